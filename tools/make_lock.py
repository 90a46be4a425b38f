"""Write models.lock from the facts: `python tools/make_lock.py`, or `--check` to see whether it would change.

The published model's facts are literals, because nobody may change them by changing a file. The embedded
model's digests are those of the files in minice/artifacts/builtin/.
"""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from minice.artifacts.lock import FilePin, Lock, ModelPin, format_lock, parse_lock  # noqa: E402
from minice.scores import ScoreScale  # noqa: E402

BUILTIN = ROOT / "minice" / "artifacts" / "builtin"
HEADER = "# Written by tools/make_lock.py; edit that, not this. The format is described in minice/artifacts/lock.py.\n"

PUBLISHED = ModelPin(
    id="ms-marco-MiniLM-L6-v2",
    repository="cross-encoder/ms-marco-MiniLM-L6-v2",
    aliases=("cross-encoder/ms-marco-MiniLM-L-6-v2",),
    revision="233902d25c440f23af6f7d6e94d2946bac0bee0a",
    license="Apache-2.0",
    max_length=512,
    scale=ScoreScale.LOGIT,
    files=(
        FilePin(
            role="model",
            precision="fp32",
            path="onnx/model.onnx",
            size=91_011_230,
            sha256="5d3e70fd0c9ff14b9b5169a51e957b7a9c74897afd0a35ce4bd318150c1d4d4a",
        ),
        FilePin(
            role="tokenizer",
            path="tokenizer.json",
            size=711_396,
            sha256="d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66",
        ),
        FilePin(
            role="config",
            path="config.json",
            size=794,
            sha256="380e02c93f431831be65d99a4e7e5f67c133985bf2e77d9d4eba46847190bacc",
        ),
        FilePin(
            role="vocab",
            optional=True,
            path="vocab.txt",
            size=231_508,
            sha256="07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        ),
    ),
)

# What the embedded int8 file was made from; too large to ship, so a literal.
EMBEDDED_SOURCE = FilePin(
    role="model",
    precision="fp32",
    optional=True,
    path="model.onnx",
    size=90_982_500,
    sha256="d428be89568e24c2b6306067b04df1e32c56a7c74bb2276b6f3324734d7df671",
)


def shipped_file(role: str, name: str, precision: str | None = None) -> FilePin:
    """Pin a file of the embedded model as it lies in the package."""
    data = (BUILTIN / name).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return FilePin(role=role, precision=precision, path=name, size=len(data), sha256=sha256)


def lock_text() -> str:
    """Return the text of models.lock."""
    embedded = ModelPin(
        id="minice-l6",
        embedded=True,
        license="Apache-2.0",
        max_length=512,
        scale=ScoreScale.LOGIT,
        files=(
            shipped_file("model", "model.int8.onnx", "int8"),
            EMBEDDED_SOURCE,
            shipped_file("tokenizer", "tokenizer.json"),
            shipped_file("config", "config.json"),
        ),
    )
    text = HEADER + format_lock(Lock(models=(embedded, PUBLISHED)))
    parse_lock(text)  # what is written can be read
    return text


def main(arguments: list[str]) -> int:
    """Write the lock, or with ``--check`` exit with 1 if it is not what would be written."""
    path = ROOT / "models.lock"
    text = lock_text()
    if arguments == ["--check"]:
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        print("models.lock is up to date" if same else "models.lock is out of date: python tools/make_lock.py")
        return 0 if same else 1
    if arguments:
        print("usage: python tools/make_lock.py [--check]", file=sys.stderr)
        return 2
    path.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
