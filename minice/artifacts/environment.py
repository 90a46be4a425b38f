"""Environment variables, as this room reads them."""

import os
from collections.abc import Mapping


def setting(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return an environment variable.

    Args:
        name: Of the variable.
        environ: Where it is taken from.

    Returns:
        Its value; None if it is unset, empty or blank.
    """
    value = environ.get(name, "")
    return value if value.strip() else None
