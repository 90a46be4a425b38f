"""Errors: classes, codes, attributes; the wording is free."""

import copy
import inspect
import pickle

import pytest

from minice import errors
from minice.errors import InputError, MiniceError

# The public table: class, exit code of the command line, HTTP status.
TABLE = {
    "MiniceError": (1, 500),
    "InputError": (2, 400),
    "ConfigError": (2, 500),
    "LockError": (3, 500),
    "ModelNotFoundError": (4, 404),
    "IntegrityError": (5, 500),
    "GraphError": (6, 500),
    "EngineUnavailableError": (7, 501),
    "ScorerError": (8, 502),
    "ClosedError": (1, 503),
}
CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, MiniceError)}


def test_every_error_stands_in_the_table_with_its_codes():
    assert {name: (kind.exit_code, kind.http_status) for name, kind in CLASSES.items()} == TABLE


def test_bases_that_callers_rely_on():
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.ClosedError, RuntimeError)
    assert all(issubclass(kind, MiniceError) for kind in CLASSES.values())


@pytest.mark.parametrize("name", TABLE)
def test_attributes_and_text(name):
    error = CLASSES[name]("expected text, got None", where="passages[3]")
    assert (error.message, error.where) == ("expected text, got None", "passages[3]")
    assert str(error) == "passages[3]: expected text, got None"
    assert str(CLASSES[name]("no such model")) == "no such model"
    assert CLASSES[name]("no such model").where == ""


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_survive_copying_and_pickling(name, clone):
    error = CLASSES[name]("wrong", where="model[0]")
    twin = clone(error)
    assert type(twin) is type(error)
    assert (twin.message, twin.where, str(twin)) == (error.message, error.where, str(error))


@pytest.mark.parametrize(
    ("outer", "where", "expected"),
    [
        ("passages", "[3]", "passages[3]"),
        ("passages[3]", "text", "passages[3].text"),
        ("passages[3]", "", "passages[3]"),
        ("model[0]", "file[2].sha256", "model[0].file[2].sha256"),
    ],
)
def test_within_prefixes_the_outer_path(outer, where, expected):
    inner = InputError("wrong", where=where)
    seen = inner.within(outer)
    assert (seen.where, seen.message) == (expected, "wrong")
    assert type(seen) is InputError
    assert inner.where == where
