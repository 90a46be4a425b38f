"""Run all that must hold before a change goes in.

Usage: python tools/check.py [--quick]

Every step runs, also after a failure; the exit code is 1 if any failed. The last two steps install minice into
environments of their own and need a package index; ``--quick`` leaves them out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGIT_ATOL = 2e-5  # as in tests/conftest.py
QUERY = "how do I undo the last commit"
PASSAGES = [
    "git stash saves uncommitted work for later.",
    "Undo the last commit but keep the changes with git reset --soft HEAD~1.",
    "Bread needs flour, water, salt and yeast.",
]
SCORE = f"""
import json, sys
from minice import CrossEncoder
with CrossEncoder.open(engine=sys.argv[1]) as encoder:
    print(json.dumps([float(logit) for logit in encoder.score({QUERY!r}, {PASSAGES!r})]))
for name in {{"torch", "transformers", "onnx", "onnxruntime", "huggingface_hub"}} - {{sys.argv[1]}}:
    assert name not in sys.modules, name
"""


class StepFailed(Exception):
    """A step found something wrong; the message says what."""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command whose output goes straight to ours."""
    print("$", *command, flush=True)
    code = subprocess.run([str(part) for part in command], cwd=cwd, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise StepFailed(f"exit code {code}")


def capture(*command: str | Path, cwd: Path, expected_code: int = 0) -> str:
    """Run a command of an installed minice, away from the checkout; return what it printed, errors included."""
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MINICE_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode != expected_code:
        raise StepFailed(f"expected exit code {expected_code}, got {done.returncode}")
    return done.stdout


def check_format() -> None:
    """Formatter."""
    run(sys.executable, "-m", "ruff", "format", "--check")


def check_lint() -> None:
    """Linter."""
    run(sys.executable, "-m", "ruff", "check")


def check_types() -> None:
    """Strict typing."""
    run(sys.executable, "-m", "mypy", "--strict")


def check_tests() -> None:
    """Tests and doctests."""
    run(sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--durations", "10")


def print_import_time() -> None:
    """Import time of fresh interpreters; printed, never judged."""
    for statement in ("import minice", "from minice import CrossEncoder"):
        code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
        times = [
            float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
            for _ in range(7)
        ]
        print(
            f"{statement:34} median of 7: {statistics.median(times) * 1000:6.1f} ms, best {min(times) * 1000:6.1f} ms"
        )


def check_base_install() -> None:
    """A base install: no extra, away from the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        python = make_environment(place, [str(build_wheel(place))])
        minice = python.with_name("minice")
        capture(python, "-m", "pip", "list", "--format", "freeze", cwd=place)
        capture(minice, "demo", cwd=place)
        notes = place / "notes.jsonl"
        notes.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES), encoding="utf-8")
        ranked = capture(minice, "rerank", QUERY, notes, "--top-n", "2", cwd=place).splitlines()
        if [json.loads(line)["text"] for line in ranked] != [PASSAGES[1], PASSAGES[0]]:
            raise StepFailed("rerank did not put the right note first")
        capture(minice, "verify", "minice-l6", cwd=place)
        capture(minice, "doctor", cwd=place)
        compare_logits(json.loads(capture(python, "-c", SCORE, "numpy", cwd=place)), "a base install")
        (place / "model.onnx").write_bytes(b"no model")
        needing: dict[str, list[str | Path]] = {
            "quantize": ["quantize", place / "model.onnx"],
            "onnxruntime": ["rerank", QUERY, notes, "--engine", "onnxruntime"],
        }
        for extra, arguments in needing.items():
            if f"minice[{extra}]" not in capture(minice, *arguments, cwd=place, expected_code=7):
                raise StepFailed(f"{arguments[0]} without its extra did not name the install command")


def check_lowest_versions() -> None:
    """The lowest supported versions of what minice depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["onnxruntime"]]
    lowest = [requirement.replace(">=", "==") for requirement in requirements]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        python = make_environment(place, [str(build_wheel(place)), *lowest])
        capture(python, "-m", "pip", "list", "--format", "freeze", cwd=place)
        for engine in ("numpy", "onnxruntime"):
            logits = json.loads(capture(python, "-W", "error", "-c", SCORE, engine, cwd=place))
            compare_logits(logits, f"the lowest versions, {engine}")
        capture(python.with_name("minice"), "demo", cwd=place)


def build_wheel(place: Path) -> Path:
    """Build the wheel with what is installed here."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place / "dist")
    (wheel,) = (place / "dist").glob("*.whl")
    return wheel


def make_environment(place: Path, requirements: list[str]) -> Path:
    """Make a virtual environment; return its Python."""
    run(sys.executable, "-m", "venv", place / "venv")
    python = place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    return python


def compare_logits(logits: list[float], what: str) -> None:
    """Hold another installation's logits against those of this one, which the tests hold against onnxruntime."""
    done = subprocess.run([sys.executable, "-c", SCORE, "numpy"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    difference = max(abs(ours - theirs) for ours, theirs in zip(json.loads(done.stdout), logits, strict=True))
    print(f"largest logit difference of {what}: {difference:.1e}")
    if not difference <= LOGIT_ATOL:
        raise StepFailed(f"{what}: logits differ by {difference}, expected at most {LOGIT_ATOL}")


STEPS: list[Callable[[], None]] = [
    check_format,
    check_lint,
    check_types,
    check_tests,
    print_import_time,
    check_base_install,
    check_lowest_versions,
]
NEED_AN_INDEX = (check_base_install, check_lowest_versions)


def main() -> int:
    """Run the steps and sum them up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the steps that install into new environments")
    quick = parser.parse_args().quick
    outcomes = []
    for step in STEPS:
        title = (step.__doc__ or "").rstrip(".")
        if quick and step in NEED_AN_INDEX:
            outcomes.append(("skipped", 0.0, f"{title} (--quick)"))
            continue
        print(f"\n===== {title}", flush=True)
        start = time.perf_counter()
        try:
            step()
            outcome = "ok"
        except (StepFailed, OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"FAILED: {error}", flush=True)
            outcome = "FAILED"
        outcomes.append((outcome, time.perf_counter() - start, title))
    print("\n===== Summary")
    for outcome, seconds, title in outcomes:
        print(f"{outcome:8} {seconds:6.1f} s  {title}")
    failed = any(outcome == "FAILED" for outcome, *_ in outcomes)
    print("Something failed; see above." if failed else "All good.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
