"""``python -m minice`` is the ``minice`` command."""

import sys

from minice.cli import main

if __name__ == "__main__":
    sys.exit(main())
