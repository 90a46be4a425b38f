"""Shared by all tests: a generated two-layer model, and the full-size files beside the checkout.

The tiny model is a BERT encoder with one logit whose weights come from a seed, so that nothing needs a
download; it is written out with the ``onnx`` package and pinned by a lock of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

LOGIT_ATOL = 2e-5  # largest logit difference that counts as agreement between two engines
SHARED = Path(__file__).resolve().parents[2] / "shared"
GRAPHS = Path(__file__).parent / "data" / "graphs"
# Of these, BERT with erf-GELU as exporters and the optimizer of onnxruntime write it.
BERTS = (
    "bert-legacy-eager-opset11",
    "bert-legacy-eager-opset14",
    "bert-legacy-eager-opset17",
    "bert-legacy-sdpa-opset14",
    "bert-dynamo-opset18",
    "bert-ort-basic",
)
SHARED_SKIP = "needs the folder ../shared beside the checkout (full-size models and graphs): not found"

VOCABULARY = 64
POSITIONS = 64
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (".", ",", "?", "the", "and", "##ing", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("shared") and not SHARED.is_dir():
        pytest.skip(SHARED_SKIP)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of full-size models; a test that asks for it is skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(SHARED_SKIP)
    return SHARED


class GraphBuilder:
    """Collects nodes and initializers the way BERT exporters write them."""

    def __init__(self, seed: int, hidden: int) -> None:
        self.random = np.random.default_rng(seed)
        self.hidden = hidden
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def tensor(self, name: str, values: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, name: str, *shape: int, scale: float = 0.25, center: float = 0.0) -> str:
        return self.tensor(name, (center + scale * self.random.standard_normal(shape)).astype(np.float32))

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        output = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def dense(self, x: str, name: str, inputs: int, outputs: int) -> str:
        product = self.node("MatMul", x, self.weight(f"MatMul_{name}", inputs, outputs))
        return self.node("Add", self.weight(f"{name}.bias", outputs), product)

    def norm(self, x: str, name: str) -> str:
        weight = self.weight(f"{name}.weight", self.hidden, center=1.0)
        bias = self.weight(f"{name}.bias", self.hidden)
        return self.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=1e-12)

    def gelu(self, x: str) -> str:
        """The exact form: x * (1 + erf(x / sqrt(2))) * 0.5."""
        bell = self.node("Erf", self.node("Div", x, "sqrt_two"))
        return self.node("Mul", self.node("Mul", x, self.node("Add", bell, "one")), "half")

    def heads(self, x: str, permutation: list[int]) -> str:
        return self.node("Transpose", self.node("Reshape", x, "split"), perm=permutation)


def tiny_onnx(
    *, seed: int = 7, hidden: int = 32, heads: int = 4, layers: int = 2, vocabulary: int = VOCABULARY
) -> bytes:
    """A two-layer BERT cross-encoder, opset 17: three int64 inputs [batch, sequence] -> logits [batch, 1]."""
    g = GraphBuilder(seed, hidden)
    for name, value in {
        "sqrt_two": 2**0.5,
        "one": 1.0,
        "half": 0.5,
        "masked": -10000.0,
        "root_d": (hidden / heads) ** 0.5,
    }.items():
        g.tensor(name, np.float32(value))
    g.tensor("split", np.array([0, 0, heads, hidden // heads]))
    g.tensor("joined", np.array([0, 0, hidden]))
    g.tensor("position_ids", np.arange(POSITIONS).reshape(1, POSITIONS))
    for name, value in {"zero": [0], "first": [1], "mask_axes": [1, 2]}.items():
        g.tensor(name, np.array(value))
    g.tensor("cls", np.array(0))

    length = g.node("Gather", g.node("Shape", "input_ids"), "first", axis=0)
    positions = g.node("Slice", "position_ids", "zero", length, "first")
    embeddings = "bert.embeddings"
    words = g.node(
        "Gather", g.weight(f"{embeddings}.word_embeddings.weight", vocabulary, hidden, scale=1.0), "input_ids"
    )
    segments = g.node("Gather", g.weight(f"{embeddings}.token_type_embeddings.weight", 2, hidden), "token_type_ids")
    places = g.node("Gather", g.weight(f"{embeddings}.position_embeddings.weight", POSITIONS, hidden), positions)
    x = g.norm(g.node("Add", g.node("Add", words, segments), places), f"{embeddings}.LayerNorm")

    visible = g.node("Cast", g.node("Unsqueeze", "attention_mask", "mask_axes"), to=TensorProto.FLOAT)
    mask = g.node("Mul", g.node("Sub", "one", visible), "masked")
    for index in range(layers):
        layer = f"bert.encoder.layer.{index}"
        query, key, value = (
            g.heads(g.dense(x, f"{layer}.attention.self.{part}", hidden, hidden), permutation)
            for part, permutation in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scores = g.node("Add", g.node("Div", g.node("MatMul", query, key), "root_d"), mask)
        context = g.node("MatMul", g.node("Softmax", scores, axis=-1), value)
        context = g.node("Reshape", g.node("Transpose", context, perm=[0, 2, 1, 3]), "joined")
        attended = g.dense(context, f"{layer}.attention.output.dense", hidden, hidden)
        x = g.norm(g.node("Add", attended, x), f"{layer}.attention.output.LayerNorm")
        inner = g.gelu(g.dense(x, f"{layer}.intermediate.dense", hidden, 2 * hidden))
        x = g.norm(
            g.node("Add", g.dense(inner, f"{layer}.output.dense", 2 * hidden, hidden), x),
            f"{layer}.output.LayerNorm",
        )

    row = g.node("Gather", x, "cls", axis=1)
    pooler = g.weight("bert.pooler.dense.weight", hidden, hidden), g.weight("bert.pooler.dense.bias", hidden)
    pooled = g.node("Tanh", g.node("Gemm", row, *pooler, transB=1))
    head = g.weight("classifier.weight", 1, hidden, scale=1.0), g.weight("classifier.bias", 1)
    g.nodes.append(helper.make_node("Gemm", [pooled, *head], ["logits"], name="logits", transB=1))

    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
    graph = helper.make_graph(g.nodes, "tiny", inputs, [output], g.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def tiny_tokenizer(*, extra: int = 0) -> bytes:
    """A WordPiece tokenizer.json over 64 entries (and ``extra`` more), with the usual leftovers."""
    entries = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
    entries += [f"extra{number}" for number in range(extra)]
    special = [
        {
            "id": i,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, name in enumerate(SPECIALS)
    ]
    piece = {name: {"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")}
    side = {name: {"Sequence": {"id": name, "type_id": "AB".index(name)}} for name in "AB"}
    data = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 128},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": special,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [piece["[CLS]"], side["A"], piece["[SEP]"]],
            "pair": [
                piece["[CLS]"],
                side["A"],
                piece["[SEP]"],
                side["B"],
                {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
            ],
            "special_tokens": {
                name: {"id": name, "ids": [entries.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {entry: number for number, entry in enumerate(entries)},
        },
    }
    return json.dumps(data, ensure_ascii=False).encode()


def lock_entry(name: str, files: dict[str, bytes], *, max_length: int = POSITIONS) -> str:
    """The lock text that pins ``files`` (path -> bytes): the model ``*.onnx`` and a ``tokenizer.json``."""
    lines = [
        "lock-version = 1",
        "",
        "[[model]]",
        f'id = "{name}"',
        'license = "Apache-2.0"',
        f"max-length = {max_length}",
        'scale = "logit"',
    ]
    for path, data in files.items():
        is_model = path.endswith(".onnx")
        lines += ["", "[[model.file]]", f'role = "{"model" if is_model else "tokenizer"}"']
        lines += [f'path = "{path}"', f"size = {len(data)}", f'sha256 = "{hashlib.sha256(data).hexdigest()}"']
        if is_model:
            lines.append('precision = "fp32"')
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """A model on disk in a flat folder, and the lock text that pins it under the id ``tiny``."""

    folder: Path
    lock_text: str

    @property
    def model_path(self) -> Path:
        return self.folder / "model.onnx"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def files(self, precision: str | None = None) -> Any:
        """Its verified bytes, read through the store."""
        from minice.artifacts.lock import parse_lock
        from minice.artifacts.store import open_model

        pin = parse_lock(self.lock_text).find("tiny")
        return open_model(pin, model_dir=self.folder, precision=precision, environ={})


def write_tiny(folder: Path, model: bytes, tokenizer: bytes, *, max_length: int = POSITIONS) -> TinyModel:
    """Put a model and a tokenizer into ``folder``, and pin them."""
    files = {"model.onnx": model, "tokenizer.json": tokenizer}
    for path, data in files.items():
        (folder / path).write_bytes(data)
    lock_text = lock_entry("tiny", files, max_length=max_length)
    (folder / "models.lock").write_text(lock_text, encoding="utf-8")
    return TinyModel(folder=folder, lock_text=lock_text)


# How a script in a process of its own opens the tiny model, whose folder is its first argument; the second, if
# any, is the engine.
OPEN_TINY = """
import sys
from pathlib import Path

def open_tiny(**options):
    from minice.artifacts.lock import parse_lock
    from minice.artifacts.store import open_model
    from minice.cross_encoder import CrossEncoder
    folder = Path(sys.argv[1])
    pin = parse_lock((folder / "models.lock").read_text()).find("tiny")
    options.setdefault("engine", sys.argv[2] if len(sys.argv) > 2 else "numpy")
    return CrossEncoder._from_files(open_model(pin, model_dir=folder), **options)
"""


def run_python(
    code: str, *arguments: object, timeout_s: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that finds this minice; its output comes back as text."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MINICE_")}
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        # Python 3.12 warns about every fork beside threads, and forks beside threads are what some scripts test.
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", code, *map(str, arguments)],
        env=inherited | {"PYTHONPATH": path} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The generated model, its tokenizer and its lock, in one folder."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), tiny_onnx(), tiny_tokenizer())


@pytest.fixture
def engine() -> str:
    """The engine of ``open_tiny``; a module that holds both engines to the same tests makes it a parameter."""
    return "numpy"


@pytest.fixture
def assert_same(engine: str) -> Callable[[Any, Any], None]:
    """Compare logits of equal pairs that were batched in different ways: to the bit where the engine promises it."""

    def compare(ours: Any, theirs: Any) -> None:
        if engine == "numpy":
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
        else:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=LOGIT_ATOL)

    return compare


@pytest.fixture
def open_tiny(tiny: TinyModel, engine: str) -> Iterator[Callable[..., Any]]:
    """Opens encoders over the tiny model, with any option of ``open``; closes them afterwards."""
    from minice.cross_encoder import CrossEncoder

    opened: list[Any] = []

    def open_one(model: TinyModel = tiny, **options: Any) -> Any:
        options.setdefault("engine", engine)
        opened.append(CrossEncoder._from_files(model.files(), **options))
        return opened[-1]

    yield open_one
    for encoder in opened:
        encoder.close()
