"""``minice doctor``: what the scoring verbs would do here, and why; what a bug report should hold.

Nothing is written, nothing connects, and what is wrong with a machine ends up in the report rather than ending it.
The screen is made of the object that ``--json`` prints and holds nothing else. Its keys, which stay:

* ``format``: 1. ``usable``, ``exit_code``: whether the model can be used, and what `minice rerank` would exit with.
* ``minice``: ``version``, ``location``. ``python``: ``version``, ``implementation``.
* ``packages``: of each dependency ``name``, ``version`` (null if not installed, "unknown" without metadata),
  ``required``, ``purpose``, ``install``.
* ``platform``: ``system``, ``release``, ``machine``, ``libc``, ``processor``.
* ``blas``: ``libraries`` that were found (``name``, ``version``, ``kernel``, ``threading``), ``built_with`` (what NumPy
  says of its own), ``steerable``, ``core_type``; null if NumPy cannot be imported.
* ``threads``: ``workers``, ``decided_by``, ``cpu_count``, ``affinity``, ``cgroup_quota``; null as ``blas``.
* ``engines``: ``used``, ``decided_by``, ``available`` (``name``, ``installed``, ``version``, ``install``).
* ``environment``: of each variable that is set and matters ``name``, ``value`` ("set" for what is not shown),
  ``known``, ``nearest``, ``note``.
* ``models``: of each pin ``id``, ``used``, ``status``, ``revision``, ``searched`` (``path``, ``decided_by``), ``files``
  (``role``, ``precision``, ``name``, ``size``, ``sha256``, ``status``, ``path``, ``message``). "ok" was hashed, as
  only the files of the model in use are; of the others "present" says that the size is right. ``sha256`` is pinned.
* ``model``: ``asked``, ``decided_by``, ``precision_decided_by``, ``info`` (of the encoder, with ``engine_info``; null
  if it cannot be opened), ``open_ms``, ``load_ms``.
* ``sample``: ``pairs``, ``repeats``, ``median_ms``, ``pairs_per_s``, ``logits`` (``query``, ``passage``, ``logit``),
  ``peak_mib``; null if the model cannot be used.
* ``problems``: ``where``, ``message`` (with the next step), ``exit_code`` (null if scoring goes on regardless).
"""

import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minice import __version__
from minice.cli.arguments import Arguments, Command, Option, nearest
from minice.cli.encoder import MODEL_OPTIONS, model_dir, open_encoder
from minice.cli.writing import harmless, to_json, write
from minice.errors import ConfigError, MiniceError, ModelNotFoundError

if TYPE_CHECKING:
    from minice.artifacts.lock import Lock, ModelPin
    from minice.artifacts.store import FileReport
    from minice.cross_encoder import CrossEncoder

Json = dict[str, Any]

FORMAT: Final = 1
DEFAULT_MODEL: Final = "minice-l6"  # the store's; importing that needs NumPy, which may be what is broken
WIDTH: Final = 100  # columns
SHOWN_DIGITS: Final = 12  # of a digest on the screen, as in a model_id; JSON has all 64
SAMPLE_PAIRS: Final = 20
REPEATS: Final = 3  # odd: the median is one of them
LOGITS_SHOWN: Final = 2

VARIABLES: Final = ("MINICE_HOME", "MINICE_LOCK", "MINICE_MODEL", "MINICE_MODEL_DIR")
_HUB: Final = "minice fetch reads it"
_CACHE: Final = "says where the hub's cache lies"
_BLAS_THREADS: Final = "minice holds the BLAS at one thread while it scores"
OTHER_VARIABLES: Final = {
    "HF_ENDPOINT": _HUB,
    "HF_HOME": _CACHE,
    "HF_HUB_CACHE": _CACHE,
    "HF_HUB_OFFLINE": _HUB,
    "HF_TOKEN": _HUB,
    "HUGGINGFACE_HUB_CACHE": _CACHE,
    "HUGGING_FACE_HUB_TOKEN": _HUB,
    "MKL_NUM_THREADS": _BLAS_THREADS,
    "OMP_NUM_THREADS": _BLAS_THREADS,
    "OPENBLAS_CORETYPE": "chooses the kernel of the BLAS",
    "OPENBLAS_NUM_THREADS": _BLAS_THREADS,
    "TRANSFORMERS_OFFLINE": _HUB,
    "VECLIB_MAXIMUM_THREADS": _BLAS_THREADS,
    "XDG_CACHE_HOME": _CACHE,
    "XDG_DATA_HOME": "says where models lie without MINICE_HOME",
}
SECRETS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

# Name -> what it is for; the key of the extra that brings it, or None where minice itself needs it.
PACKAGES: Final[dict[str, tuple[str, str | None]]] = {
    "numpy": ("scoring", None),
    "tokenizers": ("scoring", None),
    "threadpoolctl": ("scoring", None),
    "onnxruntime": ("--engine onnxruntime", "onnxruntime"),
    "huggingface_hub": ("minice fetch", "fetch"),
    "onnx": ("minice quantize", "quantize"),
}
# Other distributions of the same package; what counts is that it can be imported.
_OTHER_BUILDS: Final = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")}

# What a broken installation, a broken folder or a machine that is too small raises. Anything else is a bug of ours.
_DIAGNOSED: Final = (MiniceError, OSError, ImportError, MemoryError)


@dataclass(frozen=True, slots=True)
class _Problems:
    """What was found to be wrong, in the order in which it was found, each thing once."""

    found: list[Json] = field(default_factory=list)

    def add(self, where: str, message: str, exit_code: int | None = None) -> None:
        if not any((where, message) == (known["where"], known["message"]) for known in self.found):
            self.found.append({"where": where, "message": message, "exit_code": exit_code})

    @contextmanager
    def noted(self, where: str, *, fatal: bool = False) -> Iterator[None]:
        """Turn what goes wrong inside into a problem; ``fatal`` ones have the exit code they would end with."""
        try:
            yield
        except MiniceError as error:
            self.add(_option_or_place(error) or where, error.message, error.exit_code if fatal else None)
        except _DIAGNOSED as error:
            step = "" if isinstance(error, OSError | MemoryError) else "; install minice again into this Python"
            problem = f"{type(error).__name__}: {str(error) or 'no more is known'}{step}"
            self.add(where, problem, MiniceError.exit_code if fatal else None)

    @property
    def exit_code(self) -> int:
        """That of the first fatal one, else 0."""
        return next((problem["exit_code"] for problem in self.found if problem["exit_code"] is not None), 0)


def _option_or_place(error: MiniceError) -> str:
    """Where an error is; the library names its own argument where here it was an option."""
    options = {option.key: f"--{option.name}" for option in MODEL_OPTIONS}
    return options.get(error.where, error.where) if isinstance(error, ConfigError | ModelNotFoundError) else error.where


def run(arguments: Arguments) -> int:
    """Print the report; the exit code is what the scoring verbs would end with."""
    report = diagnose(arguments)
    write(to_json(report) + "\n" if arguments["json"] else screen(report))
    code: int = report["exit_code"]
    return code


def diagnose(arguments: Arguments) -> Json:
    """Find out what the scoring verbs would do with these options, and why.

    Args:
        arguments: Parsed options, those of ``MODEL_OPTIONS``.

    Returns:
        The object that the docstring of this module describes; URLs are without what only their owner may know.
    """
    problems = _Problems()
    packages = [_package(name) for name in PACKAGES]
    report: Json = {
        "format": FORMAT,
        "usable": False,
        "exit_code": 0,
        "minice": {"version": __version__, "location": str(Path(__file__).resolve().parent.parent)},
        "python": _python(),
        "packages": packages,
        "platform": _platform(),
        "blas": None,
        "threads": None,
        "engines": _engines(arguments, packages),
        "environment": _environment(arguments),
        "models": [],
        "model": _chosen(arguments),
        "sample": None,
        "problems": problems.found,
    }
    # First of all what would happen: its error comes first, and the peak of memory is that of scoring.
    with problems.noted(report["model"]["asked"], fatal=True):
        _use(arguments, report)
    report["usable"], report["exit_code"] = not problems.found, problems.exit_code
    with problems.noted("blas"):
        report["blas"] = _blas()
    with problems.noted("threads"):
        report["threads"] = _threads(arguments, report["model"]["info"])
    with problems.noted("models"):
        lock = _lock(problems)
        report["models"] = [_pinned(pin, lock, arguments, problems) for pin in lock.models]
    _judge(report, problems)
    masked: Json = _masked(report)
    return masked


# --- the machine ---------------------------------------------------------------------------------------


def _python() -> Json:
    import platform

    return {"version": platform.python_version(), "implementation": platform.python_implementation()}


def _package(name: str) -> Json:
    purpose, extra = PACKAGES[name]
    wanted = "minice" if extra is None else f"'minice[{extra}]'"
    return {
        "name": name,
        "version": _version(name),
        "required": extra is None,
        "purpose": purpose,
        "install": f"pip install {wanted}",
    }


def _version(name: str) -> str | None:
    """The installed version of a package, without importing it; None where it cannot be imported."""
    # Imported here, as in every function below: help and argument mistakes need none of it.
    from importlib import metadata, util

    try:
        if util.find_spec(name) is None:
            return None
    except (ImportError, ValueError):  # a half-removed package may have no spec
        return None
    for distribution in (name, *_OTHER_BUILDS.get(name, ())):
        try:
            return metadata.version(distribution) or "unknown"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _platform() -> Json:
    """The operating system and the processor, without the name of the machine."""
    import platform

    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": _libc(),
        "processor": _processor(),
    }


def _libc() -> str | None:
    import platform
    import sysconfig

    try:
        name, version = platform.libc_ver()
    except OSError:  # it reads the interpreter's file
        return None
    if name:
        return f"{name} {version}".strip()
    return "musl" if "musl" in str(sysconfig.get_config_var("SOABI")) else None


def _processor() -> str | None:
    """What the processor calls itself, where the system tells."""
    import platform

    if sys.platform != "linux":
        return platform.processor() or None
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # x86 says "model name"; what the boards of other architectures say, in the order of their use.
    named = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    values = {key.strip(): value.strip() for key, value in named.items()}
    return next((values[key] for key in ("model name", "Model", "Hardware", "cpu") if values.get(key)), None)


def _blas() -> Json:
    from minice.engines.threads import blas_limit  # brings NumPy, whose BLAS has to be there to be found

    return {
        "libraries": blas_limit.describe(),
        "built_with": _built_with(),
        "steerable": blas_limit.steerable,
        "core_type": os.environ.get("OPENBLAS_CORETYPE") or None,
    }


def _built_with() -> str | None:
    """Name and version of the BLAS that NumPy was built with, which is all there is to know of macOS's own."""
    import numpy as np

    try:
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (TypeError, KeyError):  # NumPy before 1.25 only prints it; distributions leave some of it out
        return None


def _threads(arguments: Arguments, info: Json | None) -> Json:
    from minice.engines.threads import available_cpus, cpu_limits

    limits = cpu_limits()
    available = available_cpus()
    if arguments["threads"] is not None:
        decided_by, workers = "--threads", arguments["threads"]
    else:
        workers = available
        decided_by = "cpu count" if limits["affinity"] is None else "affinity"
        if limits["cgroup_quota"] is not None and available < (limits["affinity"] or limits["cpu_count"] or 1):
            decided_by = "cgroup quota"
    engine = (info or {}).get("engine_info") or {}
    return {"workers": engine.get("threads", workers), "decided_by": decided_by, **limits}


def _engines(arguments: Arguments, packages: list[Json]) -> Json:
    versions = {package["name"]: package for package in packages}
    default = next(option.default for option in MODEL_OPTIONS if option.name == "engine")
    asked = arguments["engine"]
    return {
        "used": asked or "numpy",
        "decided_by": "default" if asked == default else "--engine",
        "available": [
            {
                "name": name,
                "installed": versions[name]["version"] is not None,
                "version": versions[name]["version"],
                "install": versions[name]["install"],
            }
            for name in ("numpy", "onnxruntime")
        ],
    }


# --- the environment -----------------------------------------------------------------------------------


def _environment(arguments: Arguments) -> list[Json]:
    ours = sorted(name for name in os.environ if name.upper().startswith("MINICE_"))
    others = sorted(name for name in os.environ if name in OTHER_VARIABLES)
    return [_variable(name, os.environ[name], arguments) for name in [*ours, *others]]


def _variable(name: str, value: str, arguments: Arguments) -> Json:
    known = name in VARIABLES or name in OTHER_VARIABLES
    shown = value
    if name in SECRETS or not known:  # nobody knows what a variable that we do not know holds
        shown = "set"
    elif name == "HF_ENDPOINT":  # a scheme may have been forgotten, what precedes the host has not
        shown = re.sub(r"^(\w+://)?.*@", r"\1***@", value)
    return {
        "name": name,
        "value": shown,
        "known": known,
        "nearest": None if known else nearest(name.upper(), VARIABLES),
        "note": _note(name, arguments) if value.strip() else "blank, which counts as unset",
    }


def _note(name: str, arguments: Arguments) -> str:
    """Why a variable has no effect here, or what its effect is."""
    from minice.artifacts.environment import setting

    if name == "MINICE_MODEL" and arguments["model"] is not None:
        return "--model wins"
    if name in ("MINICE_MODEL_DIR", "MINICE_HOME") and arguments["model_dir"] is not None:
        return "--model-dir wins"
    if name == "MINICE_HOME" and setting("MINICE_MODEL_DIR"):
        return "MINICE_MODEL_DIR wins"
    return OTHER_VARIABLES.get(name, "")


# --- models --------------------------------------------------------------------------------------------


def _lock(problems: _Problems) -> "Lock":
    """Every known pin; those that came with minice where the user's lock is no use."""
    from minice.artifacts.lock import known_lock, shipped_lock

    with problems.noted("MINICE_LOCK"):
        return known_lock()
    return shipped_lock()


def _chosen(arguments: Arguments) -> Json:
    """Which model is used, and who said so."""
    asked, decided_by = arguments["model"], "--model"
    if asked is None:
        from minice.artifacts.environment import setting

        asked, decided_by = setting("MINICE_MODEL"), "MINICE_MODEL"
    if asked is None:
        asked, decided_by = DEFAULT_MODEL, "default"
    return {
        "asked": asked,
        "decided_by": decided_by,
        "precision_decided_by": "--precision" if arguments["precision"] else "default",
        "info": None,
        "open_ms": None,
        "load_ms": None,
    }


def _use(arguments: Arguments, report: Json) -> None:
    """Do what the scoring verbs do, on pairs of our own, and write down how far it came."""
    import_module("minice.cross_encoder")  # so that no import is timed
    model = report["model"]
    start = time.perf_counter()
    with open_encoder(arguments) as encoder:
        model["open_ms"] = _ms_since(start)
        model["info"] = encoder.info()
        start = time.perf_counter()
        encoder.warm()
        model["load_ms"] = _ms_since(start)
        model["info"] = encoder.info()
        report["sample"] = _sample(encoder)


def _ms_since(start: float) -> float:
    return round(1000 * (time.perf_counter() - start), 1)


def _sample(encoder: "CrossEncoder") -> Json:
    """Score built-in pairs: how fast, and two logits, so that two reports can be compared."""
    from minice.artifacts import sample_pairs

    pairs = [(query, passage) for query, passages in sample_pairs.SAMPLE_PAIRS for passage in passages][:SAMPLE_PAIRS]
    encoder.score_pairs(pairs)  # a first run pays for threads and memory
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        logits = encoder.score_pairs(pairs)
        times.append(_ms_since(start))
    median = sorted(times)[REPEATS // 2]
    return {
        "pairs": len(pairs),
        "repeats": REPEATS,
        "median_ms": median,
        "pairs_per_s": round(1000 * len(pairs) / median, 1) if median else None,
        "logits": [
            # The fewest digits that read back as the same float32; JSON has no word for what is not finite.
            {"query": query, "passage": passage, "logit": float(str(logit)) if math.isfinite(logit) else None}
            for (query, passage), logit in zip(pairs[:LOGITS_SHOWN], logits, strict=False)
        ],
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float | None:
    """The most memory that this process held at once, where the platform tells."""
    # First without resource: what Linux says there may be the peak of the program that started this one.
    with suppress(OSError):
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        if found := re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE):
            return round(int(found[1]) / 1024, 1)
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def _pinned(pin: "ModelPin", lock: "Lock", arguments: Arguments, problems: _Problems) -> Json:
    """One pin and its files; only those of the model that is used are hashed."""
    from minice.artifacts.store import inspect, locate, places

    folder, used = model_dir(arguments), _chosen(arguments)["asked"] in pin.names
    reports: tuple[FileReport, ...] = ()
    with problems.noted(pin.id):
        reports = inspect(pin, model_dir=folder, lock=lock) if used else locate(pin, model_dir=folder)
    searched: list[Json] = []
    with suppress(ConfigError):  # no such folder can be: looking for the files has said so already
        for place in places(pin, model_dir=folder):
            searched.append({"path": place.path, "decided_by": place.origin if folder is None else "--model-dir"})
    digests = {file.path: file.sha256 for file in pin.files}
    return {
        "id": pin.id,
        "used": used,
        "status": _status(reports),
        "revision": pin.revision,
        "searched": searched,
        "files": [
            {
                "role": report.role,
                "precision": report.precision,
                "name": report.name,
                "size": report.size,
                "sha256": digests.get(report.name),  # a file that `minice quantize` wrote is not pinned
                "status": report.status,
                "path": report.path,
                "message": report.message,
            }
            for report in reports
        ],
    }


def _status(reports: "tuple[FileReport, ...]") -> str:
    """The state of a model in one word: of its files the worst, but "incomplete" if only some of them are there."""
    bad = [report.status for report in reports if not report.good]
    if not bad:
        return reports[0].status if reports else "unknown"
    if worse := [status for status in bad if status != "missing"]:
        return worse[0]
    return "incomplete" if any(report.path for report in reports) else "missing"


# --- problems ------------------------------------------------------------------------------------------


def _judge(report: Json, problems: _Problems) -> None:
    """Add what is wrong though nothing was raised."""
    for variable in report["environment"]:
        if not variable["known"]:
            meant = f"did you mean {variable['nearest']}?" if variable["nearest"] else f"known: {', '.join(VARIABLES)}"
            problems.add(variable["name"], f"minice knows no such variable, so it has no effect; {meant}")
    if report["blas"] and not report["blas"]["steerable"] and report["engines"]["used"] == "numpy":
        problems.add(
            "blas",
            "the number of threads of NumPy's BLAS cannot be set, so the last bits of a logit may depend on it; set "
            "OMP_NUM_THREADS=1 (macOS: VECLIB_MAXIMUM_THREADS=1) before the start, or install NumPy with OpenBLAS",
        )
    engine = (report["model"]["info"] or {}).get("engine_info") or {}
    if engine.get("scores_depend_on_batch"):
        problems.add(
            report["model"]["asked"],
            "a passage's score depends on the passages that are scored with it, because this file rounds activations "
            "by the range of a whole batch; use the fp32 file, or the int8 file that minice quantize makes of it",
        )
    if report["sample"] and any(entry["logit"] is None for entry in report["sample"]["logits"]):
        problems.add(report["model"]["asked"], "the sample's logits are not finite; run minice verify, then report it")
    for pin in report["models"]:
        _judge_files(pin, report, problems)


def _judge_files(pin: Json, report: Json, problems: _Problems) -> None:
    """Files that are there and wrong; a model of which nothing is there was never put in place."""
    if pin["status"] in ("ok", "present", "missing", "unknown"):
        return
    # Opening it has said so at length; and a folder that is named holds one model, as a rule: another one is not
    # damaged for sharing its file names.
    if (not report["usable"]) if pin["used"] else _is_named(pin):
        return
    for file in pin["files"]:
        bad = file["status"] not in ("ok", "present", "absent")
        # Who uses one precision need not have the other.
        spare = pin["used"] and file["role"] == "model" and file["status"] == "missing"
        if bad and not spare:
            step = "" if "Run: " in file["message"] else f". Run: minice verify {pin['id']}"
            problems.add(f"{pin['id']}/{file['name']}", file["message"] + step)


def _is_named(pin: Json) -> bool:
    return any(place["decided_by"] in ("--model-dir", "MINICE_MODEL_DIR") for place in pin["searched"])


def _masked(value: Any) -> Any:
    """Take out of every URL, wherever it stands, what its owner may want to keep: user, password, query."""
    if isinstance(value, str):
        bare = re.sub(r"(?<=//)[^\n]*@", "***@", value)
        return re.sub(r"(//[^\s'\"?#]*[?#])[^\s'\"]+", r"\1***", bare)
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list | tuple) else value


# --- the screen ----------------------------------------------------------------------------------------


def screen(report: Json) -> str:
    """Lay out a report for people: at most ``WIDTH`` characters a line, nothing that is not in the report."""
    sections: dict[str, Iterable[str]] = {
        "minice": _minice_lines(report),
        "platform": [_joined(report["platform"].values())],
        "BLAS": _blas_lines(report["blas"]),
        "threads": _threads_lines(report["threads"]),
        "engine": _engine_lines(report["engines"]),
        "variables": map(_variable_line, report["environment"]),
        "model": _model_lines(report["model"]),
        "files": [line for pin in report["models"] for line in _pin_lines(pin)],
        "sample": _sample_lines(report["sample"]),
        "problems": [_problem_line(problem) for problem in report["problems"]],
    }
    width = max(map(len, sections)) + 2
    lines: list[str] = []
    for name, texts in sections.items():
        wrapped = [line for text in texts for line in _wrapped(text, WIDTH - width)] or ["none"]
        lines += [f"{label:<{width}}{line}" for label, line in zip([name, *[""] * len(wrapped)], wrapped, strict=False)]
    return "".join(f"{line}\n" for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines; what belongs to it stands further in."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        harmless(text.strip()),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )


def _joined(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts if part)


def _minice_lines(report: Json) -> Iterator[str]:
    python, packages = report["python"], report["packages"]
    yield f"{report['minice']['version']} in {report['minice']['location']}"
    there = [f"{package['name']} {package['version']}" for package in packages if package["version"]]
    yield _joined([f"Python {python['version']} ({python['implementation']})", *there])
    for package in packages:
        if not package["version"]:
            yield f"{package['name']} is not installed ({package['purpose']}): {package['install']}"


def _blas_lines(blas: Json | None) -> Iterator[str]:
    if blas is None:
        yield "unknown"
        return
    for library in blas["libraries"]:
        yield f"{library['name']} {library['version']}, kernel {library['kernel']}, threads by {library['threading']}"
    if not blas["libraries"]:
        yield f"none was found; NumPy says it was built with {blas['built_with'] or 'one that it does not name'}"
    chosen = f"; OPENBLAS_CORETYPE={blas['core_type']} chose the kernel" if blas["core_type"] else ""
    yield ("minice can set its threads" if blas["steerable"] else "minice cannot set its threads") + chosen


def _threads_lines(threads: Json | None) -> Iterator[str]:
    if threads is None:
        yield "unknown"
        return
    quota, affinity = threads["cgroup_quota"], threads["affinity"]
    limits = [
        f"{threads['cpu_count']} CPUs",
        affinity and f"affinity {affinity}",
        f"cgroup quota {quota:g}" if quota else "no cgroup quota",
    ]
    yield f"{threads['workers']} by {threads['decided_by']} ({_joined(limits)})"


def _engine_lines(engines: Json) -> Iterator[str]:
    yield f"{engines['used']} by {engines['decided_by']}"
    for engine in engines["available"]:
        there = f"installed, {engine['version']}" if engine["installed"] else f"not installed: {engine['install']}"
        yield f"{engine['name']}: {there}"


def _variable_line(variable: Json) -> str:
    meant = f"unknown; did you mean {variable['nearest']}?" if variable["nearest"] else "unknown"
    note = variable["note"] or ("" if variable["known"] else meant)
    return f"{variable['name']}={variable['value']}" + (f" ({note})" if note else "")


def _model_lines(model: Json) -> Iterator[str]:
    yield f"{model['asked']} by {model['decided_by']}, precision by {model['precision_decided_by']}"
    if (info := model["info"]) is None:
        yield "cannot be opened: see problems"
        return
    # In one piece it is longer than a line: broken behind semicolons, it can be put together again.
    yield from (line.replace("; ", ";") for line in _wrapped(info["model_id"].replace(";", "; "), WIDTH - 20))
    yield f"{info['precision']}, scheme {info['scheme']}, scale {info['scale']}, max_length {info['max_length']}"
    if (engine := info["engine_info"]) is None:
        yield "cannot be loaded: see problems"
        return
    # Each engine knows best what decides its speed and its numbers; what has a section of its own is left out.
    shown = {key: value for key, value in engine.items() if key not in ("engine", "threads", "blas", "blas_steerable")}
    yield _joined(f"{key} {_as_word(value)}" for key, value in shown.items())
    yield f"opened and verified in {model['open_ms']} ms, loaded in {model['load_ms']} ms"


def _as_word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else to_json(value)


def _pin_lines(pin: Json) -> Iterator[str]:
    """A model, where it is looked for, and its files below the folder that they lie in."""
    yield f"{pin['id']}: {pin['status']}{', the one in use' if pin['used'] else ''}"
    for place in pin["searched"]:
        yield f"  looked in {place['path']} ({place['decided_by']})"
    folder = None
    for file in pin["files"]:
        if file["path"] is None:
            continue
        path = Path(file["path"])
        if path.parent != folder:
            folder = path.parent
            if str(folder) not in [place["path"] for place in pin["searched"]]:
                yield f"  found in {folder}"
        digest = (file["sha256"] or "no digest")[:SHOWN_DIGITS]
        # Only a file that was hashed is known to have the digest.
        yield f"    {path.name}  {'' if file['status'] == 'ok' else 'pinned as '}{digest}  {file['status']}"
    if pin["used"] and (missing := [file["name"] for file in pin["files"] if file["status"] == "missing"]):
        yield f"    missing: {_joined(missing)}"


def _sample_lines(sample: Json | None) -> Iterator[str]:
    if sample is None:
        return
    yield (
        f"{sample['pairs']} pairs in {sample['median_ms']} ms (median of {sample['repeats']} after a warm-up), "
        f"{sample['pairs_per_s']} pairs/s"
    )
    yield f"peak memory of the process: {sample['peak_mib'] or 'unknown'} MiB"
    for query in dict.fromkeys(entry["query"] for entry in sample["logits"]):
        logits = [entry["logit"] for entry in sample["logits"] if entry["query"] == query]
        yield f"logits {', '.join(map(str, logits))} of built-in passages for {query!r}"


def _problem_line(problem: Json) -> str:
    code = "" if problem["exit_code"] is None else f" (exit code {problem['exit_code']})"
    return f"{problem['where']}: {problem['message']}{code}"


COMMAND = Command(
    name="doctor",
    summary="what would happen here and why: what a bug report should hold",
    description="""\
Says what `minice rerank` with the same options and variables would do, and what decided that: versions, BLAS,
threads, engines, variables, the files of every model, a timed sample, and what is wrong with each. Nothing is
written and nothing connects. The report shows paths, which may hold your name; it shows no token, no password
in a URL, no text of yours and no name of the machine. Exit code: 0, or what using the model would end with.""",
    example="minice doctor\nminice doctor --json --model ms-marco-MiniLM-L6-v2 > report.json",
    run=run,
    options=(*MODEL_OPTIONS, Option(name="json", help="one JSON object, which holds more than the screen")),
)
