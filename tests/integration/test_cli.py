"""The ``minice`` command as a process, with the embedded model: bytes in, bytes out, pipes, signals, locales."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minice import CrossEncoder
from minice.cli import main

ROOT = Path(__file__).resolve().parents[2]
QUERY = "wie mache ich den letzten Commit rückgängig? 日本 😀"
PASSAGES = ["Undo the last commit with git reset --soft HEAD~1.", "日本語のメモ 😀", "crème brûlée", " "]
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals, locales and device files of POSIX systems")


def environment(**extra):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MINICE_")}
    return inherited | {"PYTHONPATH": str(ROOT)} | extra


def start(*argv, env=None, **streams):
    command = [sys.executable, "-m", "minice", *argv]
    return subprocess.Popen(command, env=environment(**(env or {})), **streams)


def run(*argv, stdin=b"", env=None, cwd=None):
    process = start(*argv, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(stdin, timeout=60)
    return process.returncode, out, err.decode()


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "Notizen für 日本.jsonl"
    lines = [json.dumps({"text": text, "né": "日本 😀"}, ensure_ascii=False) for text in PASSAGES]
    path.write_bytes(("\n".join(lines) + "\n").encode())
    return path


@POSIX
@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "latin-1"},
    ],
)
def test_utf8_whatever_the_locale(notes, env):  # FR 173
    code, out, err = run("rerank", QUERY, str(notes), env=env)
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.decode("utf-8").splitlines()]
    with CrossEncoder.open() as encoder:
        logits = encoder.score(QUERY, PASSAGES)
    assert [row["index"] for row in rows] == list(np.argsort(-logits, kind="stable"))
    for row in rows:
        assert np.float32(row["logit"]) == logits[row["index"]]
        assert row["text"] == PASSAGES[row["index"]]
        assert row["né"] == "日本 😀"
    assert '"né": "日本 😀"'.encode() in out


@POSIX
def test_stdin_and_errors_are_utf8_too():
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    code, out, _ = run("rerank", "日本", "-", "--format", "table", stdin="日本 😀\n".encode(), env=env)
    assert code == 0
    assert "日本 😀" in out.decode("utf-8")
    code, out, err = run("rerank", "q", "日本.txt", env=env)
    assert (code, out) == (2, b"")
    assert err == "minice: error: 日本.txt: cannot be read: No such file or directory\n"


@POSIX
def test_arguments_that_are_not_utf8(tmp_path):
    code, _, err = run(b"rerank", b"caf\xe9", b"x")
    assert code == 2
    assert "minice: error: QUERY: not valid UTF-8\n" in err
    # A file, on the other hand, may be called anything.
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\n")
    assert run(b"rerank", b"q", os.fsencode(tmp_path) + b"/caf\xe9.txt") == (0, b"", "")


@POSIX
def test_a_closed_pipe_ends_quietly(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": str(i), "pad": "x" * 50_000}) + "\n" for i in range(20)))
    process = start("rerank", "1", str(path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["rank"] == 1
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


@POSIX
@pytest.mark.parametrize("verb", [["--version"], ["models"]])
def test_a_full_disk_is_an_error(verb):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        process = start(*verb, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.decode() == "minice: error: [Errno 28] No space left on device\n"


@POSIX
def test_closed_stdout_and_stdin_are_errors_without_a_traceback():
    script = f'"{sys.executable}" -m minice --version >&-; echo $?; "{sys.executable}" -m minice score - <&-; echo $?'
    done = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True, timeout=60, check=False)
    assert done.stdout == b"1\n2\n"
    assert done.stderr.decode() == "minice: error: stdout is closed\nminice: error: <stdin>: stdin is closed\n"


@POSIX
@pytest.mark.parametrize("during", ["reading", "scoring"])
def test_ctrl_c_is_quiet(during):
    code = "import sys, minice.cli; sys.stderr.write('ready\\n'); sys.stderr.flush(); sys.exit(minice.cli.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "rerank", "query", "-"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr.readline() == b"ready\n"
    if during == "scoring":
        process.stdin.write(b"word " * 200 + b"\n")
        process.stdin.write((b"word " * 200 + b"\n") * 3000)
        process.stdin.close()
        time.sleep(2)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert (process.stdout.read(), process.stderr.read()) == (b"", b"")
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()


@POSIX
def test_a_terminal_gets_a_table():
    import pty

    outer, inner = pty.openpty()
    process = start("rerank", "q", "-", stdin=subprocess.PIPE, stdout=inner, env={"COLUMNS": "60"})
    process.communicate(b"one\n\x1b[31mtwo\n", timeout=60)
    os.close(inner)
    shown = b""
    try:
        while chunk := os.read(outer, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(outer)
    assert process.returncode == 0
    lines = shown.decode().splitlines()
    assert lines[0].split() == ["rank", "index", "logit", "score", "passage"]
    assert b"\x1b" not in shown
    assert lines[3].startswith("model: minice-l6@")


@POSIX
def test_progress_is_for_a_terminal(tmp_path):
    import pty

    path = tmp_path / "notes.txt"
    path.write_text("a\n" * 1100)
    outer, inner = pty.openpty()
    process = start("rerank", "q", str(path), "--top-n", "1", stdout=subprocess.PIPE, stderr=inner)
    out, _ = process.communicate(timeout=60)
    os.close(inner)
    shown = os.read(outer, 4096).decode()
    os.close(outer)
    assert process.returncode == 0
    assert len(out.splitlines()) == 1
    assert shown == "\rscored 512 of 1100\rscored 1024 of 1100\rscored 1100 of 1100\r\n"
    assert run("rerank", "q", str(path), "--top-n", "1") == (0, out, "")
    path.write_text("a\n" * 512)
    outer, inner = pty.openpty()
    assert start("rerank", "q", str(path), stdout=subprocess.DEVNULL, stderr=inner).wait(timeout=60) == 0
    os.set_blocking(outer, False)
    with pytest.raises(BlockingIOError):  # a short input says nothing
        os.read(outer, 4096)
    os.close(inner)
    os.close(outer)


def test_help_and_mistakes_need_no_numpy():
    code = """
import sys
from minice.cli import main
assert main(["--help"]) == 0
assert main(["rerank", "--help"]) == 0
assert main(["rerank", "--top-n", "x"]) == 2
assert main(["rerank", "q", "-", "--top-n", "0"]) == 0
print(sorted({"numpy", "tokenizers", "onnx", "threadpoolctl", "tomllib"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.stderr.decode().splitlines()[-1] == "[]"


def test_listing_and_verifying_need_no_tokenizer():
    code = """
import sys
from minice.cli import main
assert main(["models"]) == 0
assert main(["verify", "minice-l6"]) == 0
assert not {"tokenizers", "threadpoolctl", "onnx"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def rows(capsysbinary, monkeypatch, tmp_path):
    for name in ("MINICE_MODEL", "MINICE_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)

    def rows(verb, *argv, content=""):
        path = tmp_path / "in.jsonl"
        path.write_text(content)
        assert main([verb, *argv, str(path)]) == 0
        return [json.loads(line) for line in capsysbinary.readouterr().out.decode("utf-8").splitlines()]

    return rows


def test_texts_that_say_the_same_to_the_model_tie_and_keep_their_order(rows):  # FR 17, FR 21
    for texts in ([" ", "\n\t", ""], ["😀", "🎉", "💀"]):
        found = rows("rerank", "party", content="".join(json.dumps({"text": t}) + "\n" for t in texts))
        assert [row["index"] for row in found] == [0, 1, 2]
        assert len({row["logit"] for row in found}) == 1


def test_lone_surrogates_are_scored_and_come_back(rows):  # FR 20
    content = '{"text": "ok"}\n{"text": "bad \\ud800 text"}\n{"text": "\\ud83d\\udc4d"}\n'
    found = {row["index"]: row for row in rows("rerank", "ok", content=content)}
    assert found[1]["text"] == "bad \ud800 text"
    assert found[2]["text"] == "👍"
    assert all(np.isfinite(row["logit"]) for row in found.values())


def test_score_equals_rerank_equals_the_library(rows):
    query = "how do I undo the last commit"
    pairs = "".join(json.dumps({"query": query, "passage": text}) + "\n" for text in PASSAGES)
    scored = [row["logit"] for row in rows("score", content=pairs)]
    ranked = rows("rerank", query, content="".join(json.dumps({"text": t}) + "\n" for t in PASSAGES))
    with CrossEncoder.open() as encoder:
        logits = encoder.score(query, PASSAGES)
        model_id = encoder.model_id
    assert [np.float32(logit) for logit in scored] == list(logits)
    assert {row["index"]: row["logit"] for row in ranked} == dict(enumerate(scored))
    assert {row["model_id"] for row in ranked} == {model_id}


def test_options_reach_the_encoder(rows):
    content = json.dumps({"text": "one [SEP] two " * 40}) + "\n"
    plain, short, literal = (
        rows("rerank", "q", *options, content=content)[0]
        for options in (
            [],
            ["--max-length", "16"],
            ["--special-tokens=literal", "--threads=1", "--max-batch-tokens=64"],
        )
    )
    assert len({row["model_id"] for row in (plain, short, literal)}) == 3
    assert len({row["logit"] for row in (plain, short, literal)}) == 3
    assert "max_length=16" in short["model_id"]


@pytest.mark.parametrize(
    ("argv", "env", "code", "part"),
    [
        (["--model", "minice-l7"], {}, 4, "error: --model: no model is pinned as 'minice-l7'"),
        ([], {"MINICE_MODEL": "nobody/nothing"}, 4, "error: MINICE_MODEL: no model is pinned as 'nobody/nothing'"),
        (["--model", "ms-marco-MiniLM-L6-v2"], {"MINICE_HOME": "nowhere", "HF_HUB_CACHE": "nowhere"}, 4, "not on disk"),
        (["--model-dir", "nowhere"], {}, 4, "nowhere"),
        (["--model-dir", ""], {}, 2, "error: --model-dir: "),
        (["--max-length", "513"], {}, 2, "error: --max-length: expected an integer from 5 to 512"),
        (["--precision", "fp32"], {}, 4, "no 'model.onnx' in the package or "),
        (["--model", "minice-l6"], {"MINICE_MODEL": "nobody", "MINICE_MODEL_DIR": " "}, 0, ""),  # FR 145
    ],
)
def test_exit_codes_of_model_errors(tmp_path, monkeypatch, capsysbinary, argv, env, code, part):
    for name in ("MINICE_MODEL", "MINICE_MODEL_DIR", "MINICE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "n.txt").write_text("a passage\n")
    assert main(["rerank", "q", str(tmp_path / "n.txt"), *argv]) == code
    out, err = capsysbinary.readouterr()
    assert part in err.decode()
    assert (out == b"") == (code != 0)
    assert (err == b"") == (code == 0)
