"""Which room may import which, and what importing and scoring may bring in or change."""

import ast
import json
import sys
from pathlib import Path

import pytest
from conftest import OPEN_TINY, run_python

PACKAGE = Path(__file__).resolve().parents[1] / "minice"

# A room may import itself and what stands before it. A new room gets its place here.
ROOMS = ["errors", "scores", "encoding", "engines", "artifacts", "cross_encoder", "cli"]
RUNTIME = {"numpy", "tokenizers", "threadpoolctl"}  # the declared dependencies
OPTIONAL = {  # extras, and where they may be imported
    "onnx": {"artifacts/quantize.py"},
    "onnxruntime": {"engines/ort_engine.py"},
    "huggingface_hub": {"artifacts/fetch.py"},
    "filelock": {"artifacts/fetch.py"},
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def room_of(module):
    """The room of a module's path; the package's own two files stand at its end."""
    name = module.split("/")[0].removesuffix(".py")
    return "cli" if name == "__main__" else name


def imports_of(module):
    """(dotted name, whether at import time) of everything that a module imports."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    late = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            late.update(id(inner) for part in node.body for inner in ast.walk(part))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the room they come from"
            # `from minice import errors` names a room, `from minice.errors import InputError` a thing.
            joined = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name, id(node) not in late) for name in joined]
    return found


def test_every_module_is_in_a_room():
    assert {room_of(module) for module in MODULES} - {"__init__"} <= set(ROOMS)
    assert len(MODULES) > 10


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) != "__init__"])
def test_imports_point_one_way(module):
    for name, _ in imports_of(module):
        if name == "minice.__version__" or not name.startswith("minice"):
            continue
        target = name.split(".")[1] if "." in name else ""
        assert target in ROOMS, f"{module} imports {name}, which names no room"
        assert ROOMS.index(target) <= ROOMS.index(room_of(module)), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_third_party_imports_are_declared(module):
    for name, at_import in imports_of(module):
        package = name.split(".")[0]
        if package == "minice" or package in sys.stdlib_module_names:
            continue
        if package in OPTIONAL:
            assert module in OPTIONAL[package], f"{module} imports {name}"
            assert not at_import, f"{module} imports {name} outside of a function"
        else:
            assert package in RUNTIME, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_slow_imports_are_late(module):
    slow = {"tokenizers", "threadpoolctl"}
    early = {name.split(".")[0] for name, at_import in imports_of(module) if at_import}
    assert not early & slow


def foreign(names):
    """Packages among module names that neither Python nor this test brought."""
    packages = {name.split(".")[0] for name in names}
    # Compiled modules register Cython's helpers, which are no package.
    return {name for name in packages - sys.stdlib_module_names if not name.lstrip("_").startswith("cython")}


def test_scoring_loads_the_declared_dependencies_and_nothing_else(tiny):  # FR 150
    code = """
import asyncio, json
from minice import CrossEncoder
tiny = open_tiny()
tiny.score("the", ["a"])
asyncio.run(tiny.ascore("the", ["a"]))
embedded = CrossEncoder.open()
embedded.answer("undo a commit", ["git reset --soft HEAD~1"])
json.dumps([embedded.info(), tiny.info()])
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = run_python("import sys; before = set(sys.modules)" + OPEN_TINY + code, tiny.folder)
    assert done.stderr == ""
    assert foreign(json.loads(done.stdout)) == {"minice", *RUNTIME}


def test_importing_minice_alone_loads_nothing_foreign():
    code = "import sys; before = set(sys.modules); import minice, json; print(json.dumps([*set(sys.modules) - before]))"
    done = run_python(code)
    assert foreign(json.loads(done.stdout)) == {"minice"}


def test_import_load_and_score_change_nothing_of_the_host(tiny):  # FR 151, FR 153
    code = """
import gc, json, locale, logging, os, signal, sys, threading, warnings
import numpy as np, threadpoolctl, tokenizers  # what they set is their business

def state():
    return {
        "handlers": list(logging.root.handlers), "level": logging.root.level, "disabled": logging.root.manager.disable,
        "filters": list(warnings.filters), "environment": dict(os.environ), "folder": os.getcwd(),
        "umask": (mask := os.umask(0o22), os.umask(mask))[0], "locale": locale.setlocale(locale.LC_ALL),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "errors": np.geterr(), "print": np.get_printoptions(), "hook": sys.excepthook, "threads": threading.excepthook,
        "path": list(sys.path), "recursion": sys.getrecursionlimit(), "gc": gc.get_threshold(),
        "random": np.random.get_state()[1].tolist(), "encodings": (sys.stdout.encoding, sys.stderr.encoding),
        "blas": [(entry["filepath"], entry["num_threads"]) for entry in threadpoolctl.threadpool_info()],
    }

before = state()
from minice import CrossEncoder, InputError
for encoder in (open_tiny(), CrossEncoder.open()):
    with encoder:
        encoder.score("the zebra", ["a cat", "", "long " * 900])
        try:
            encoder.score("the zebra", [None])
        except InputError:
            pass
after = state()
assert after == before, [name for name in before if before[name] != after[name]]
"""
    done = run_python(OPEN_TINY + code, tiny.folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loggers_stay_quiet_and_unconfigured(tiny):  # FR 151
    code = """
import logging
open_tiny().score("the", ["a"])
ours = [logger for name, logger in logging.root.manager.loggerDict.items() if name.split(".")[0] == "minice"]
assert all(isinstance(logger, logging.PlaceHolder) or logger.level == 0 and logger.propagate for logger in ours)
"""
    done = run_python(OPEN_TINY + code, tiny.folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
