"""The wheel and the sdist: what is in them, what they ask for, and that the wheel works where it is unpacked."""

import email
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import run_python
from packaging.requirements import Requirement

import minice

ROOT = Path(__file__).resolve().parents[2]
COMPILED = (".so", ".pyd", ".dll", ".dylib", ".pyc", ".o", ".a")
BUILTIN = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "minice/artifacts/builtin").rglob("*")
    if path.is_file() and path.suffix != ".pyc"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the sdist and the wheel that was built from it; offline, with what is installed."""
    missing = [name for name in ("build", "hatchling") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} to build the package")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist_names(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    return {name.split("/", 1)[1] for name in names if "/" in name}


def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(wheel.read(name).decode())


def test_the_embedded_model_is_there_at_all():
    assert {Path(name).suffix for name in BUILTIN} >= {".onnx", ".json"}


def test_wheel_holds_what_a_fresh_install_needs(wheel):
    names = set(wheel.namelist())
    assert {"minice/models.lock", "minice/py.typed", "minice/__init__.py", *BUILTIN} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"minice", f"minice-{minice.__version__}.dist-info"}
    assert wheel.read("minice/models.lock") == (ROOT / "models.lock").read_bytes()
    for name in BUILTIN:
        assert wheel.read(name) == (ROOT / name).read_bytes()


def test_sdist_holds_what_a_build_and_a_test_run_need(sdist_names):
    expected = {"models.lock", "LICENSE", "README.md", "pyproject.toml", "minice/py.typed", "tests/conftest.py"}
    assert {*expected, "tools/check.py", ".ci/run", *BUILTIN} <= sdist_names


def test_nothing_compiled_is_shipped(wheel, sdist_names):
    assert not [name for name in {*wheel.namelist(), *sdist_names} if name.endswith(COMPILED)]
    assert [line for line in wheel_file(wheel).splitlines() if line.startswith("Tag:")] == ["Tag: py3-none-any"]


def wheel_file(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    return wheel.read(name).decode()


def test_three_declared_dependencies(wheel):
    required = metadata(wheel).get_all("Requires-Dist")
    base = [Requirement(line) for line in required if "extra ==" not in line]
    assert {requirement.name for requirement in base} == {"numpy", "tokenizers", "threadpoolctl"}
    # FR 149: no upper bound, except where a release is known to drop what is used here (tokenizers 1.0).
    capped = {part.name: str(bound) for part in base for bound in part.specifier if bound.operator != ">="}
    assert capped == {"tokenizers": "<1"}


def test_metadata(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("minice", minice.__version__)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found.get_payload().startswith("# minice")
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "minice = minice.cli:main" in wheel.read(name).decode()


def test_the_unpacked_wheel_scores(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import minice
assert minice.__file__.startswith(sys.argv[1]), minice.__file__
with minice.CrossEncoder.open() as encoder:
    good, bad = encoder.score("how do I undo the last commit", ["git reset --soft HEAD~1 undoes it", "Bread and salt"])
    assert good > bad, (good, bad)
    assert encoder.info()["paths"]["model"].startswith(sys.argv[1])
"""
    done = run_python(code, tmp_path, MINICE_HOME=str(tmp_path / "none"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
