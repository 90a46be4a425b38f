"""minice: a cross-encoder reranking runtime in NumPy."""

from importlib import import_module
from typing import TYPE_CHECKING

from minice.errors import (
    ClosedError,
    ConfigError,
    EngineUnavailableError,
    GraphError,
    InputError,
    IntegrityError,
    LockError,
    MiniceError,
    ModelNotFoundError,
    ScorerError,
)

if TYPE_CHECKING:
    from minice.cross_encoder import CrossEncoder
    from minice.scores import Scores, ScoreScale

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "ConfigError",
    "CrossEncoder",
    "EngineUnavailableError",
    "GraphError",
    "InputError",
    "IntegrityError",
    "LockError",
    "MiniceError",
    "ModelNotFoundError",
    "ScoreScale",
    "ScorerError",
    "Scores",
    "__version__",
]

# Public names whose modules need NumPy: imported when they are asked for, so `import minice` costs nothing.
_LAZY = {
    "CrossEncoder": "minice.cross_encoder",
    "ScoreScale": "minice.scores",
    "Scores": "minice.scores",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
