"""README.md is true: its examples run and print what it shows, and its tables say what the code says."""

import importlib.util
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import lock_entry, tiny_onnx, tiny_tokenizer
from hub import REVISION, Hub

import minice
from minice import errors
from minice.artifacts.lock import shipped_lock

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_FENCE = re.compile(
    r"(?P<mark><!-- (?:command: [\w-]+|needs the hub) -->\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)
ACTIVATE = ". .venv/bin/activate\n"
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def examples():
    """(kind, code, shown output or None) of every block that is to run here, in order."""
    found = []
    for block in _FENCE.finditer(README):
        if block["mark"] and "command:" in block["mark"]:
            continue  # installs from an index: .ci/run runs these
        if block["mark"]:
            found.append(("hub", block["code"], None))
        elif block["kind"] == "text":
            kind, code, _ = found[-1]
            found[-1] = (kind, code, block["code"])
        else:
            found.append((block["kind"], block["code"], None))
    return found


PUBLISHED = "ms-marco-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The environment in which a local server stands for the hub, and a small model for the published one."""
    files = {"onnx/model.onnx": tiny_onnx(), "tokenizer.json": tiny_tokenizer(), "config.json": b'{"num_labels": 1}'}
    lock = lock_entry("tiny", {name: data for name, data in files.items() if name != "config.json"})
    lock = lock.replace("license", f'repository = "acme/tiny"\nrevision = "{REVISION}"\nlicense', 1)
    path = tmp_path_factory.mktemp("hub") / "tiny.lock"
    path.write_text(lock, encoding="utf-8")
    with Hub({"acme/tiny": files}) as server:
        yield {"HF_ENDPOINT": server.url, "MINICE_LOCK": str(path), "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, hub):
    """Runs one example in a folder that all share, without a network; ``minice`` is found once .venv is active."""
    folder = tmp_path_factory.mktemp("readme")
    venv.create(folder / ".venv", with_pip=False, symlinks=True)
    command = folder / ".venv" / "bin" / "minice"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m minice "$@"\n')
    command.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MINICE_")}
    environment = inherited | {
        "PATH": os.defpath,
        "PYTHONPATH": str(ROOT),
        "MINICE_HOME": str(folder / "home"),
        "COLUMNS": "100",
    }

    active = []

    def run(kind, code):
        if code == ACTIVATE:  # lasts in a terminal; here each example has a shell of its own
            active.append(code)
        elif kind in ("sh", "hub"):
            code = "".join(active) + code
        if kind == "hub":
            assert PUBLISHED in code or "my-reranker" in code
            code = code.replace(PUBLISHED, "tiny")
        start = [sys.executable, "-W", "error", "-c", code] if kind == "python" else ["sh", "-e", "-c", code]
        done = subprocess.run(
            start, cwd=folder, env=environment | (hub if kind == "hub" else {}), stdin=subprocess.DEVNULL,
            capture_output=True, encoding="utf-8", timeout=60, check=False,
        )  # fmt: skip
        # What goes on during a download is told on stderr.
        assert (done.returncode, done.stderr if kind != "hub" else "") == (0, ""), done.stderr
        return done.stdout

    return run


def assert_same(shown, printed):
    """Words are equal, and numbers within one unit of the last shown digit: processors differ in the last bits."""
    assert _NUMBER.sub("#", printed).split() == _NUMBER.sub("#", shown).split()
    for ours, theirs in zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True):
        digits = min(len(ours.partition(".")[2]), 5)
        assert float(ours) == pytest.approx(float(theirs), abs=1.01 * 10**-digits)


@pytest.mark.skipif(os.name != "posix", reason="the README's commands are for a POSIX shell")
def test_the_examples_print_what_is_shown(run):  # FR 148
    found = examples()
    assert {kind for kind, _, _ in found} == {"python", "sh", "hub"}
    assert sum(shown is not None for _, _, shown in found) >= 5
    shell = [code for kind, code, _ in found if kind == "sh"]
    assert shell[:2] == [ACTIVATE, "minice demo --format table\n"]
    for kind, code, shown in found:
        printed = run(kind, code)
        assert printed or code == ACTIVATE
        if shown is not None:
            assert_same(shown, printed)


def test_the_two_commands_at_the_top_are_run_by_ci():
    spec = importlib.util.spec_from_file_location("readme_command", ROOT / "tools" / "readme_command.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    commands = tool.readme_commands(README)
    assert list(commands) == ["demo", "check"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "for name in demo check; do" in script
    assert 'tools/readme_command.py "$name"' in script
    assert "minice demo" in commands["demo"]
    assert "tools/check.py" in commands["check"]
    # Both stand on the first screen.
    assert README.index("tools/check.py") < README.index("\n## ")


def test_every_option_that_is_mentioned_exists():  # FR 148
    from minice.cli import COMMANDS

    known = {f"--{option.name}" for command in COMMANDS.values() for option in command.options} | {"--help"}
    prose = _FENCE.sub("", README)
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)) - {"--quick", "--rounds"}  # those are tools' own
    assert mentioned <= known
    verbs = set(re.findall(r"`minice ([a-z]+)", README))
    assert verbs <= set(COMMANDS)


def test_the_table_of_errors_is_the_code():
    rows = re.findall(r"^\| `(\w+Error)` \|.*\| (\d+) \|$", README, re.M)
    classes = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MiniceError)
    }
    assert {name: int(code) for name, code in rows} == classes
    assert set(classes) <= set(minice.__all__)


def test_the_tables_of_models_are_the_lock():
    for pin in shipped_lock().models:
        for file in pin.files:
            if file.role == "model":
                row = f"| `{pin.id}` ({file.precision}) | 6 | {file.size:,} bytes | {pin.max_length} | {pin.license} |"
                assert f"{row} `{file.sha256[:12]}` |" in README
            if not pin.embedded:
                assert re.search(rf"^\| `{file.path}`.*\| {file.size:,} \| `{file.sha256}` \|$", README, re.M)
        for name in (*pin.names, pin.revision):
            assert name is None or f"`{name}`" in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
