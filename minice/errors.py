"""Every exception that minice raises on purpose, with its exit code and HTTP status.

Class, attributes and exit codes are part of the public surface; the wording of messages is not.
"""

from typing import ClassVar, Self


class MiniceError(Exception):
    """Base of every minice error; never raised itself.

    Attributes:
        message: What is wrong, what was expected, what came, and the next step.
        where: Path of the place, for instance ``passages[3]`` or ``model[0].file[2].sha256``;
            empty where there is none.
        exit_code: What the command line exits with.
        http_status: What the server answers with.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.where))

    def within(self, outer: str) -> Self:
        """Return the same error seen from one level further out: ``outer`` goes before ``where``.

        >>> str(InputError("expected text, got None", where="[3]").within("passages"))
        'passages[3]: expected text, got None'
        """
        joint = "" if not self.where or self.where.startswith("[") else "."
        return type(self)(self.message, where=f"{outer}{joint}{self.where}")


def _rebuild(kind: type[MiniceError], message: str, where: str) -> MiniceError:
    return kind(message, where=where)


class InputError(MiniceError, ValueError):
    """A caller's value is wrong."""

    exit_code = 2
    http_status = 400


class ConfigError(MiniceError):
    """An option or environment variable is unknown, malformed or does not apply."""

    exit_code = 2


class LockError(MiniceError):
    """A lock file does not follow its format."""

    exit_code = 3


class ModelNotFoundError(MiniceError):
    """No such pin, or its files are not on disk."""

    exit_code = 4
    http_status = 404


class IntegrityError(MiniceError):
    """Bytes on disk are not the bytes that the pin names."""

    exit_code = 5


class GraphError(MiniceError):
    """Malformed ONNX, or a graph that the engine does not recognize."""

    exit_code = 6


class EngineUnavailableError(MiniceError):
    """An optional package is missing; the message holds the install command."""

    exit_code = 7
    http_status = 501


class ScorerError(MiniceError):
    """A scorer failed, ran out of time or gave an unusable answer; names the model."""

    exit_code = 8
    http_status = 502


class ClosedError(MiniceError, RuntimeError):
    """A scorer was used after, or closed during, the call."""

    http_status = 503
