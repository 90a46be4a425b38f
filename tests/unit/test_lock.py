import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minice.artifacts import lock as lock_module
from minice.artifacts.lock import (
    LARGEST_LOCK,
    PRECISIONS,
    SCHEMES,
    FilePin,
    Lock,
    ModelPin,
    checked_text,
    format_lock,
    join_locks,
    known_lock,
    parse_lock,
    read_lock,
    shipped_lock,
)
from minice.errors import ConfigError, LockError, ModelNotFoundError
from minice.scores import ScoreScale

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef" * 4
ARABIC_ONES = "\N{ARABIC-INDIC DIGIT ONE}" * 64

VALID = f"""lock-version = 1

[[model]]
id = "example-L2"
repository = "example/L2"
aliases = ["example/L-2"]
revision = "{"ab" * 20}"
license = "Apache-2.0"
max-length = 512
scale = "logit"

[[model.file]]
role = "model"
precision = "fp32"
path = "onnx/model.onnx"
size = 4386021
sha256 = "{SHA}"

[[model.file]]
role = "tokenizer"
path = "tokenizer.json"
size = 700
sha256 = "{SHA}"

[[model]]
id = "other"
license = "MIT"
max-length = 128
scale = "logit"

[[model.file]]
role = "model"
precision = "int8"
path = "model.onnx"
size = 1
sha256 = "{SHA}"

[[model.file]]
role = "tokenizer"
path = "tokenizer.json"
size = 700
sha256 = "{SHA}"

[[model.file]]
role = "vocab"
optional = true
path = "vocab.txt"
size = 7
sha256 = "{SHA}"
"""

PATH = "model[0].file[0].path"
A_PATH = "expected a relative POSIX path, got "
A_SHA = "expected 64 lowercase hex digits, got "
AN_ID = "expected letters, digits, '.', '_' and '-', at most 100, got "
A_NAME = "expected a name or owner/name, got "


def edited(old: str, new: str) -> str:
    assert old in VALID
    return VALID.replace(old, new, 1)


def with_path(path: str) -> str:
    return edited('path = "onnx/model.onnx"', f'path = "{path}"')


MALFORMED = {
    "no version": (
        edited("lock-version = 1\n", ""),
        "lock-version",
        "missing: expected a whole number, at least 1",
    ),
    "newer version": (
        edited("lock-version = 1", "lock-version = 2\nfuture = true"),
        "lock-version",
        "unknown lock version: expected 1, got 2; upgrade minice to read this lock",
    ),
    "version is text": (
        edited("lock-version = 1", 'lock-version = "1"'),
        "lock-version",
        "expected a whole number, at least 1, got '1'",
    ),
    "version is true": (
        edited("lock-version = 1", "lock-version = true"),
        "lock-version",
        "expected a whole number, at least 1, got true",
    ),
    "unknown key at the top": (
        edited("lock-version = 1", "lock-version = 1\nname = 1"),
        "name",
        "unknown key; known: lock-version, model",
    ),
    "no models": ("lock-version = 1", "model", "missing: expected one or more [[model]] tables"),
    "empty models": ("lock-version = 1\nmodel = []", "model", "expected one or more [[model]] tables, got []"),
    "models is a table": (
        "lock-version = 1\n[model]",
        "model",
        "expected one or more [[model]] tables, got a table",
    ),
    "a model is no table": ("lock-version = 1\nmodel = [1]", "model[0]", "expected a table, got 1"),
    "unknown key in a model": (
        edited("max-length", "max_length = 1\nmax-length"),
        "model[0].max_length",
        "unknown key; known: id, repository, aliases, revision, embedded, license, max-length, scale, file; "
        "did you mean 'max-length'?",
    ),
    "scheme of a fp32 file": (
        edited('precision = "fp32"', 'precision = "fp32"\nscheme = "int8-dynamic"'),
        "model[0].file[0].scheme",
        "only int8 model files have one",
    ),
    "scheme of a tokenizer": (
        edited('role = "tokenizer"', 'role = "tokenizer"\nscheme = "int8-dynamic"'),
        "model[0].file[1].scheme",
        "only int8 model files have one",
    ),
    "unknown scheme": (
        edited('precision = "int8"', 'precision = "int8"\nscheme = "int8"'),
        "model[1].file[0].scheme",
        'expected one of "int8-weight-only/1", "int8-weight-only", "int8-dynamic", "int8-static", got \'int8\'',
    ),
    "unknown key in a file": (
        edited("size = 4386021", "size = 4386021\nmd5 = 1"),
        "model[0].file[0].md5",
        "unknown key; known: role, precision, scheme, optional, path, size, sha256",
    ),
    "no id": (
        edited('id = "example-L2"\n', ""),
        "model[0].id",
        "missing: expected letters, digits, '.', '_' and '-', at most 100",
    ),
    "id is a path": (edited('"other"', '"a/b"'), "model[1].id", AN_ID + "'a/b'"),
    "id is a parent": (edited('"other"', '".."'), "model[1].id", AN_ID + "'..'"),
    "id ends in a dot": (edited('"other"', '"a."'), "model[1].id", AN_ID + "'a.'"),
    "id is empty": (edited('"other"', '""'), "model[1].id", AN_ID + "''"),
    "id has a line end": (edited('"other"', '"a\\n"'), "model[1].id", AN_ID + "'a\\n'"),
    "duplicate id": (
        edited('"other"', '"example-L2"'),
        "model[1].id",
        "the name 'example-L2' is taken by model[0].id",
    ),
    "duplicate id but for case": (
        edited('"other"', '"EXAMPLE-l2"'),
        "model[1].id",
        "the name 'EXAMPLE-l2' is taken by model[0].id",
    ),
    "alias of another model's id": (
        edited('["example/L-2"]', '["example/L-2", "other"]'),
        "model[1].id",
        "the name 'other' is taken by model[0].aliases[1]",
    ),
    "alias of its own repository": (
        edited('["example/L-2"]', '["example/L2"]'),
        "model[0].aliases[0]",
        "the name 'example/L2' is taken by model[0].repository",
    ),
    "alias is no text": (edited('["example/L-2"]', "[7]"), "model[0].aliases[0]", A_NAME + "7"),
    "alias is no name": (edited('["example/L-2"]', '["a b"]'), "model[0].aliases[0]", A_NAME + "'a b'"),
    "aliases is text": (
        edited('["example/L-2"]', '"example/L-2"'),
        "model[0].aliases",
        "expected a list, each item a name or owner/name, got 'example/L-2'",
    ),
    "repository is an address": (
        edited('"example/L2"', '"https://example/L2"'),
        "model[0].repository",
        "expected a repository as owner/name, got 'https://example/L2'",
    ),
    "repository without revision": (
        edited(f'revision = "{"ab" * 20}"\n', ""),
        "model[0].revision",
        "missing: repository and revision go together",
    ),
    "revision without repository": (
        edited('repository = "example/L2"\n', ""),
        "model[0].repository",
        "missing: repository and revision go together",
    ),
    "revision is a branch": (
        edited("ab" * 20, "main"),
        "model[0].revision",
        "expected 40 lowercase hex digits, got 'main'",
    ),
    "no license": (
        edited('license = "MIT"\n', ""),
        "model[1].license",
        "missing: expected an SPDX licence expression",
    ),
    "embedded is text": (
        edited('license = "MIT"', 'license = "MIT"\nembedded = "yes"'),
        "model[1].embedded",
        "expected true or false, got 'yes'",
    ),
    "max-length is a float": (
        edited("= 512", "= 512.0"),
        "model[0].max-length",
        "expected a whole number, at least 5, got 512.0",
    ),
    "max-length is short": (
        edited("= 512", "= 4"),
        "model[0].max-length",
        "expected a whole number, at least 5, got 4",
    ),
    "unknown scale": (
        edited('"logit"', '"cosine"'),
        "model[0].scale",
        'expected one of "logit", "probability", "passthrough", got \'cosine\'',
    ),
    "no files": (
        "lock-version = 1\n[[model]]\nid = 'a'\nlicense = 'MIT'\nmax-length = 9\nscale = 'logit'",
        "model[0].file",
        "missing: expected one or more [[model.file]] tables",
    ),
    "unknown role": (
        edited('"vocab"', '"weights"'),
        "model[1].file[2].role",
        'expected one of "model", "tokenizer", "config", "vocab", got \'weights\'',
    ),
    "no model file": (
        edited('role = "model"\nprecision = "fp32"', 'role = "config"'),
        "model[0].file",
        "no file has the role 'model'; a model needs one",
    ),
    "no tokenizer": (
        edited('role = "tokenizer"', 'role = "config"'),
        "model[0].file",
        "no file has the role 'tokenizer'; a model needs one",
    ),
    "optional default": (
        edited('precision = "fp32"', 'precision = "fp32"\noptional = true'),
        "model[0].file[0].optional",
        "the first model file is what is used by default and cannot be optional",
    ),
    "model file without precision": (
        edited('precision = "fp32"\n', ""),
        "model[0].file[0].precision",
        'missing: expected one of "fp32", "int8", because this is a model file',
    ),
    "unknown precision": (
        edited('"fp32"', '"fp16"'),
        "model[0].file[0].precision",
        'expected one of "fp32", "int8", got \'fp16\'',
    ),
    "tokenizer with precision": (
        edited('role = "tokenizer"', 'role = "tokenizer"\nprecision = "fp32"'),
        "model[0].file[1].precision",
        "only model files have one, and this is a tokenizer file",
    ),
    "two tokenizers": (
        edited('role = "vocab"\noptional = true', 'role = "tokenizer"'),
        "model[1].file[2].role",
        "a second tokenizer file; the first is file[1]",
    ),
    "two files with one base name": (
        edited('path = "vocab.txt"', 'path = "onnx/Model.onnx"'),
        "model[1].file[2].path",
        "the base name 'Model.onnx' is taken by file[0]",
    ),
    "parent": (with_path("../model.onnx"), PATH, A_PATH + "'../model.onnx': '..' is not a name"),
    "inner parent": (with_path("a/../model.onnx"), PATH, A_PATH + "'a/../model.onnx': '..' is not a name"),
    "here": (with_path("./model.onnx"), PATH, A_PATH + "'./model.onnx': '.' is not a name"),
    "double slash": (with_path("a//model.onnx"), PATH, A_PATH + "'a//model.onnx': '' is not a name"),
    "trailing slash": (with_path("model.onnx/"), PATH, A_PATH + "'model.onnx/': '' is not a name"),
    "absolute": (with_path("/model.onnx"), PATH, A_PATH + "'/model.onnx': it is absolute"),
    "backslash": (with_path("a\\\\model.onnx"), PATH, A_PATH + "'a\\\\model.onnx': it has a backslash"),
    "empty": (with_path(""), PATH, A_PATH + "'': it is empty"),
    "NUL": (with_path("model\\u0000.onnx"), PATH, A_PATH + "'model\\x00.onnx': it has a control character"),
    "line end": (with_path("model\\n.onnx"), PATH, A_PATH + "'model\\n.onnx': it has a control character"),
    "drive": (
        with_path("C:model.onnx"),
        PATH,
        A_PATH + "'C:model.onnx': it has a colon, which names a drive or a stream on Windows",
    ),
    "trailing dot": (with_path("model."), PATH, A_PATH + "'model.': Windows would drop the end of 'model.'"),
    "path is a number": (edited('"onnx/model.onnx"', "1"), PATH, A_PATH + "1"),
    "no size": (
        edited("size = 4386021\n", ""),
        "model[0].file[0].size",
        "missing: expected a whole number, at least 1",
    ),
    "negative size": (
        edited("= 4386021", "= -1"),
        "model[0].file[0].size",
        "expected a whole number, at least 1, got -1",
    ),
    "size is true": (
        edited("= 4386021", "= true"),
        "model[0].file[0].size",
        "expected a whole number, at least 1, got true",
    ),
    "size is text": (
        edited("= 4386021", '= "4 MB"'),
        "model[0].file[0].size",
        "expected a whole number, at least 1, got '4 MB'",
    ),
    "no digest": (
        edited(f'size = 7\nsha256 = "{SHA}"', "size = 7"),
        "model[1].file[2].sha256",
        "missing: expected 64 lowercase hex digits",
    ),
    "short digest": (edited(f'"{SHA}"', '"abc"'), "model[0].file[0].sha256", A_SHA + "'abc'"),
    "digest in capitals": (
        edited(f'"{SHA}"', f'"{SHA.upper()}"'),
        "model[0].file[0].sha256",
        A_SHA + f"'{SHA.upper()}'",
    ),
    "digest with a line end": (
        edited(f'"{SHA}"', f'"{SHA}\\n"'),
        "model[0].file[0].sha256",
        A_SHA + f"'{SHA}\\n'",
    ),
    "digest in Arabic digits": (
        edited(f'"{SHA}"', f'"{ARABIC_ONES}"'),
        "model[0].file[0].sha256",
        A_SHA + f"'{ARABIC_ONES}'",
    ),
    "long value is cut": (
        edited(f'"{SHA}"', f'"{"x" * 500}"'),
        "model[0].file[0].sha256",
        A_SHA + "'" + "x" * 75 + "...",
    ),
    "digest is a date": (
        edited(f'"{SHA}"', "2026-01-01"),
        "model[0].file[0].sha256",
        A_SHA + "datetime.date(2026, 1, 1)",
    ),
}


@pytest.mark.parametrize(("text", "where", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_lock_says_what_and_where(text: str, where: str, message: str) -> None:
    # FR 147: nothing malformed is replaced by a default
    with pytest.raises(LockError) as caught:
        parse_lock(text)
    assert (caught.value.where, caught.value.message) == (where, message)


@pytest.mark.parametrize("text", ["", "lock-version = ", "[[model", "a = 1\na = 2", "\x00", "a" * 10_000])
def test_text_that_is_no_lock(text: str) -> None:
    with pytest.raises(LockError):
        parse_lock(text)


def test_invalid_toml_names_the_line() -> None:
    with pytest.raises(LockError, match=r"^not valid TOML: .*at line 2, column 5"):
        parse_lock("lock-version = 1\nid =\n")


def test_deep_nesting_is_a_lock_error() -> None:
    with pytest.raises(LockError):
        parse_lock("a = " + "[" * 100_000)


def test_valid_lock() -> None:
    lock = parse_lock(VALID)
    assert lock.version == 1
    first, second = lock.models
    assert first == ModelPin(
        id="example-L2",
        repository="example/L2",
        aliases=("example/L-2",),
        revision="ab" * 20,
        license="Apache-2.0",
        max_length=512,
        scale=ScoreScale.LOGIT,
        embedded=False,
        files=(
            FilePin(role="model", precision="fp32", path="onnx/model.onnx", size=4386021, sha256=SHA),
            FilePin(role="tokenizer", path="tokenizer.json", size=700, sha256=SHA),
        ),
    )
    assert second.repository is None
    assert [file.optional for file in second.files] == [False, False, True]
    assert format_lock(lock) == VALID


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
sizes = st.integers(1, 2**62)
odd_names = st.text(min_size=1, max_size=8).filter(lambda name: lock_module._unportable(name) is None)


@st.composite
def model_pins(draw: st.DrawFn, number: int) -> ModelPin:
    """A pin whose names start with its number, so that no two clash."""
    published = draw(st.booleans())
    precisions = draw(st.permutations(PRECISIONS))[: draw(st.integers(1, 2))]
    roles = [("model", precision) for precision in precisions] + [("tokenizer", None)]
    roles += [(role, None) for role in draw(st.sets(st.sampled_from(["config", "vocab"])))]
    files = [
        FilePin(
            role=role,
            precision=precision,
            path=f"{draw(st.sampled_from(['', 'onnx/', 'a/b/']))}{index}{draw(odd_names)}",
            size=draw(sizes),
            sha256=draw(digests),
            optional=role in ("config", "vocab") and draw(st.booleans()),
            scheme=draw(st.none() | st.sampled_from(SCHEMES)) if precision == "int8" else None,
        )
        for index, (role, precision) in enumerate(roles)
    ]
    return ModelPin(
        id=f"{number}-{draw(names)}",
        repository=f"{number}r-{draw(names)}/{draw(names)}" if published else None,
        revision=draw(st.text("0123456789abcdef", min_size=40, max_size=40)) if published else None,
        aliases=tuple(f"{number}a{index}-{draw(names)}" for index in range(draw(st.integers(0, 2)))),
        license=draw(st.sampled_from(["Apache-2.0", "MIT OR (Apache-2.0 AND BSD-3-Clause)"])),
        max_length=draw(st.integers(5, 10_000)),
        scale=draw(st.sampled_from(ScoreScale)),
        embedded=draw(st.booleans()),
        files=tuple(draw(st.permutations(files))),
    )


@st.composite
def locks(draw: st.DrawFn) -> Lock:
    return Lock(models=tuple(draw(model_pins(number)) for number in range(draw(st.integers(1, 3)))))


@given(locks())
def test_parse_undoes_format(lock: Lock) -> None:
    text = format_lock(lock)
    assert parse_lock(text) == lock
    assert format_lock(parse_lock(text)) == text


@given(st.text())
def test_any_text_is_a_lock_or_a_lock_error(text: str) -> None:
    with contextlib.suppress(LockError):
        parse_lock(text)


@given(
    st.text(st.sampled_from("ab./\\:C\0\n \N{RIGHT-TO-LEFT OVERRIDE}"), max_size=12),
)
def test_an_accepted_path_stays_inside(path: str) -> None:
    if lock_module._unportable(path) is None:
        assert (Path("/root") / path).resolve().is_relative_to(Path("/root").resolve())
        assert ".." not in path.split("/")


def test_find_by_any_name() -> None:
    lock = parse_lock(VALID)
    assert lock.find("example-L2") is lock.find("example/L2") is lock.find("example/L-2") is lock.models[0]
    assert lock.find("other") is lock.models[1]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("example-l2", "; did you mean 'example-L2'?"), ("exmple/L2", "; did you mean 'example/L2'?"), ("zzz", "")],
)
def test_find_names_the_nearest_and_lists_all(name: str, hint: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        parse_lock(VALID).find(name)
    assert caught.value.message == f"no model is pinned as {name!r}; known: example-L2, other{hint}"
    assert caught.value.where == "model"


def test_file_by_role_and_precision() -> None:
    pin = shipped_lock().find("minice-l6")
    assert pin.file("model") is pin.file("model", "int8") is pin.files[0]
    assert pin.file("model", "fp32").path == "model.onnx"
    assert pin.precisions == ("int8", "fp32")
    with pytest.raises(ConfigError, match="'minice-l6' has no model file of precision 'fp16'; it has: int8, fp32"):
        pin.file("model", "fp16")
    with pytest.raises(ConfigError, match="'minice-l6' has no 'vocab' file; it has: model, tokenizer, config"):
        pin.file("vocab")


# --- the shipped lock ----------------------------------------------------------------------------------


def test_shipped_pins() -> None:
    embedded, published = shipped_lock().models
    assert (embedded.id, embedded.embedded, embedded.repository) == ("minice-l6", True, None)
    assert [(file.role, file.precision, file.path, file.optional) for file in embedded.files] == [
        ("model", "int8", "model.int8.onnx", False),
        ("model", "fp32", "model.onnx", True),
        ("tokenizer", None, "tokenizer.json", False),
        ("config", None, "config.json", False),
    ]
    assert published.id == "ms-marco-MiniLM-L6-v2"
    assert published.names[1:] == (
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        "cross-encoder/ms-marco-MiniLM-L-6-v2",
    )
    assert published.revision == "233902d25c440f23af6f7d6e94d2946bac0bee0a"
    assert [(file.size, file.sha256[:8]) for file in published.files] == [
        (91_011_230, "5d3e70fd"),
        (711_396, "d241a60d"),
        (794, "380e02c9"),
        (231_508, "07eced37"),
    ]
    for pin in (embedded, published):
        assert (pin.license, pin.max_length, pin.scale) == ("Apache-2.0", 512, ScoreScale.LOGIT)
    # The tokenizer is the same file.
    assert embedded.file("tokenizer").sha256 == published.file("tokenizer").sha256


@pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="tools/ is part of the repository only")
def test_regenerating_the_lock_changes_nothing() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_lock.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "models.lock is up to date\n"), done.stderr


def test_published_pin_equals_the_collected_facts() -> None:
    facts = ROOT.parent / "shared" / "facts" / "pins.json"
    if not facts.is_file():
        pytest.skip("../shared/facts/pins.json is not there")
    repositories = json.loads(facts.read_text(encoding="utf-8"))["repos"]
    published = shipped_lock().find("ms-marco-MiniLM-L6-v2")
    entry = next(item for item in repositories if item["repo"] == published.repository)
    stated = {file["path"]: (file["bytes"], file["sha256"]) for file in entry["files"]}
    assert {file.path: (file.size, file.sha256) for file in published.files}.items() <= stated.items()
    assert published.revision in [revision["commit"] for revision in entry["revisions"]]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package folder of its own, where the shipped lock is looked for."""
    folder = tmp_path / "site-packages" / "minice"
    folder.mkdir(parents=True)
    monkeypatch.setattr(lock_module, "_PACKAGE", folder)
    shipped_lock.cache_clear()
    yield folder
    shipped_lock.cache_clear()


def test_shipped_lock_of_a_wheel(package) -> None:
    (package / "models.lock").write_text(VALID, encoding="utf-8")
    (package.parent / "models.lock").write_text("a stranger's", encoding="utf-8")
    assert shipped_lock().models[0].id == "example-L2"


def test_shipped_lock_of_a_checkout(package) -> None:
    (package.parent / "models.lock").write_text(VALID, encoding="utf-8")
    with pytest.raises(LockError, match=re.escape(str(package / "models.lock"))):
        shipped_lock()  # a neighbour of an installed package is not ours
    (package.parent / "pyproject.toml").touch()
    assert shipped_lock().models[0].id == "example-L2"


def test_broken_installation(package) -> None:
    with pytest.raises(LockError, match="install minice again"):
        shipped_lock()
    (package / "models.lock").write_bytes(b"\xff")
    with pytest.raises(LockError, match="install minice again"):
        shipped_lock()


# --- locks of the user's own -------------------------------------------------------------------------


MINE = VALID.replace("example", "mine").replace('"other"', '"mine-too"')
TAKEN = "belongs to 'ms-marco-MiniLM-L6-v2', a model that minice pins itself; choose another"


@pytest.fixture
def mine(tmp_path) -> Path:
    path = tmp_path / "my.lock"
    path.write_text(MINE, encoding="utf-8")
    return path


def refusal(path: Path) -> tuple[str, str]:
    with pytest.raises(LockError) as caught:
        known_lock({"MINICE_LOCK": str(path)})
    return caught.value.where, caught.value.message


def test_pins_of_the_user_stand_behind_the_shipped_ones(mine) -> None:
    known = known_lock({"MINICE_LOCK": str(mine)})
    assert known.models == shipped_lock().models + parse_lock(MINE).models
    assert known.find("mine/L-2").id == "mine-L2"
    assert read_lock(mine, "here") == read_lock(str(mine), "here") == parse_lock(MINE)


@pytest.mark.parametrize("value", [None, "", " ", "\t"])
def test_no_lock_of_the_user(value) -> None:
    # FR 145
    assert known_lock({} if value is None else {"MINICE_LOCK": value}) is shipped_lock()


def test_a_mark_before_the_text_is_no_part_of_it(mine) -> None:
    mine.write_bytes(b"\xef\xbb\xbf" + MINE.encode())
    assert read_lock(mine, "") == parse_lock(MINE)


@pytest.mark.parametrize("name", ["MS-MARCO-minilm-L6-v2", "Cross-Encoder/ms-marco-MiniLM-L6-V2"])
def test_a_name_of_a_shipped_pin_is_taken_in_any_case(mine, name: str) -> None:
    mine.write_text(MINE.replace('"mine-too"', f'"mine-too"\naliases = ["{name}"]'), encoding="utf-8")
    assert refusal(mine) == (f"MINICE_LOCK: {str(mine)!r}: model[1]", f"the name {name!r} {TAKEN}")


def test_a_shipped_alias_is_no_repository_of_a_user(mine) -> None:
    name = "cross-encoder/ms-marco-MiniLM-L-6-v2"
    mine.write_text(MINE.replace('repository = "mine/L2"', f'repository = "{name}"'), encoding="utf-8")
    assert refusal(mine) == (f"MINICE_LOCK: {str(mine)!r}: model[0]", f"the name {name!r} {TAKEN}")


def test_two_pins_of_the_user_with_one_name(mine) -> None:
    mine.write_text(MINE.replace('"mine-too"', '"Mine-L2"'), encoding="utf-8")
    where, message = refusal(mine)
    assert where == f"MINICE_LOCK: {str(mine)!r}: model[1].id"
    assert message == "the name 'Mine-L2' is taken by model[0].id"


def test_a_users_model_is_not_part_of_the_package(mine) -> None:
    mine.write_text(MINE.replace('license = "MIT"', 'embedded = true\nlicense = "MIT"'), encoding="utf-8")
    assert refusal(mine) == (
        f"MINICE_LOCK: {str(mine)!r}: model[1].embedded",
        "only a model that comes with the package is embedded; leave it out",
    )


def test_a_malformed_lock_of_the_user_is_an_error(mine) -> None:
    # FR 147: it is not passed over, and the place is told
    mine.write_text(MINE.replace('scale = "logit"', 'scale = "stars"', 1), encoding="utf-8")
    assert refusal(mine) == (
        f"MINICE_LOCK: {str(mine)!r}: model[0].scale",
        'expected one of "logit", "probability", "passthrough", got \'stars\'',
    )
    mine.write_text("", encoding="utf-8")
    assert refusal(mine)[0] == f"MINICE_LOCK: {str(mine)!r}: lock-version"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "No such file or directory"),
        ("", "it is not a regular file"),
        ("my.lock/more", "Not a directory"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_lock_that_cannot_be_read(mine, name: str, reason: str) -> None:
    path = mine.parent / name
    assert refusal(path) == (
        "MINICE_LOCK",
        f"cannot read {str(path)!r}: {reason}; expected a lock as minice lock prints it",
    )


def test_a_lock_that_is_not_text(mine) -> None:
    mine.write_bytes(b"lock-version = \xff")
    assert refusal(mine)[1].startswith(f"cannot read {str(mine)!r}: 'utf-8' codec can't decode byte 0xff")


def test_a_file_too_long_for_a_lock_is_not_read(mine) -> None:
    with mine.open("wb") as file:
        file.truncate(1 << 40)
    assert "it has 1,099,511,627,776 bytes, more than 1,048,576;" in refusal(mine)[1]
    mine.write_text(MINE.ljust(LARGEST_LOCK, "\n"), encoding="utf-8")
    assert known_lock({"MINICE_LOCK": str(mine)}).find("mine-L2")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_never_ends_is_not_read(tmp_path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "it is not a regular file; expected a lock" in refusal(path)[1]
    # One that takes the file's place after the first look does not keep us waiting either.
    regular = Path(__file__).stat()
    monkeypatch.setattr(Path, "stat", lambda self: regular)
    assert "it is not a regular file; expected a lock" in refusal(tmp_path / "pipe")[1]


def test_locks_are_joined_as_they_are() -> None:
    user = parse_lock(MINE)
    assert join_locks(shipped_lock(), user, "x").models[-2:] == user.models


def test_texts_of_a_pin() -> None:
    assert checked_text("id", "my-model.v2") == "my-model.v2"
    assert checked_text("license", "NOASSERTION") == "NOASSERTION"
    for key, text in (("id", "a/b"), ("id", "a."), ("repository", "b"), ("revision", "AB" * 20), ("license", "")):
        with pytest.raises(ValueError, match=r"^expected .*, got "):
            checked_text(key, text)


def test_a_number_of_thousands_of_digits_is_no_traceback() -> None:
    with pytest.raises(LockError, match="not valid TOML"):
        parse_lock("lock-version = " + "1" * 5_000)
