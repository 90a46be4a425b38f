"""The ragged forward pass of a BERT cross-encoder, in NumPy.

A batch is one ``[tokens, hidden]`` matrix without padding; only attention sees where a pair ends. No row's
arithmetic may depend on its neighbours, so that a pair's logit is the same to the last bit whatever it is
batched with. Three things see to that:

* Dense layers run as one merged GEMM where a probe at start shows that this BLAS gives a row the same bits
  for every number of rows, and as one GEMM a pair (its own length is the shape) where it does not.
* The pooler and the classifier always run on one pair, whatever the probe said.
* Everything else (norms, softmax, GELU, attention products) works row by row or pair by pair by construction.

Array letters: N pairs, T tokens of the batch, H hidden, A heads, D = H / A, F feed-forward.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minice.encoding.pairs import PairEncoding
from minice.engines.batches import checked_lengths, fair_budget
from minice.engines.bert import BertWeights, Linear, Norm
from minice.engines.threads import Workers, available_cpus, blas_limit
from minice.errors import GraphError

Floats = NDArray[np.float32]

# Real tokens in a batch. Small working sets win: whatever leaves the L2 cache costs more than larger GEMMs save.
DEFAULT_BATCH_TOKENS = 1024

# float32 elements that element-wise work passes over at a time: two such tiles stay in any L2 cache of today.
_TILE_ELEMENTS = 65_536

# float32 elements of attention scores that are worked on at a time.
_SCORE_ELEMENTS = 131_072

# Rows of one GEMM at most (one more at the end of a batch): what the probe vouches for; merging more gains nothing.
_GEMM_ROWS = 1024

# Numbers of rows that the probe compares: odd and even, around the widths of BLAS kernels, and up to the largest.
_PROBE_ROWS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 25, 32, 33, 65, 129, _GEMM_ROWS + 1)

# tanh(GELU_ODD(x)) = erf(x / sqrt(2)): coefficients of x, x**3, ..., x**13.
# Source: our own minimax fit (tools/fit_gelu.py); |x| / 2 * |tanh(p(x)) - erf(x / sqrt(2))| <= 6.6e-8 for every x.
_GELU_ODD = tuple(
    np.float32(c)
    for c in (
        0.7978842684797475,
        0.036334148823113324,
        -3.302646362205752e-05,
        -5.5273460196286464e-05,
        3.974080996685505e-06,
        -1.3378384055619035e-07,
        1.8139418292366512e-09,
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class _Dense:
    """``x @ weight + bias`` with a weight that BLAS can take as it is."""

    weight: Floats  # [in, out], contiguous
    bias: Floats  # [out]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One encoder layer, its weights laid out for the GEMMs that run."""

    projections: tuple[_Dense, ...]  # (Q K V) fused; in the last layer (Q, K V): Q is needed for [CLS] only
    attention_output: _Dense
    attention_norm: Norm
    intermediate: _Dense
    output: _Dense
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class _Spans:
    """Where the pairs of a batch lie in its matrix, longest pair first."""

    lengths: list[int]  # [N] tokens of each pair
    starts: list[int]  # [N] first row of each pair
    groups: list[tuple[int, int]]  # runs of pairs of equal length, as half-open ranges of pairs

    @property
    def tokens(self) -> int:
        return self.starts[-1] + self.lengths[-1]


class NumpyEngine:
    """Runs a BERT cross-encoder in float32 on NumPy alone.

    Args:
        weights: A recognized model. int8 weights are turned into float32 once, here; the word-embedding
            table stays as it is and is read row by row.
        threads: Worker threads, each running whole batches; None takes the processors of this process.
        max_batch_tokens: Largest batch in real tokens (nothing is padded); a longer pair runs alone.
            None takes the measured best.

    Raises:
        GraphError: The model cannot tell the two sides of a pair apart.
    """

    name = "numpy"

    def __init__(
        self, weights: BertWeights, *, threads: int | None = None, max_batch_tokens: int | None = None
    ) -> None:
        self.threads = available_cpus() if threads is None else threads
        self.max_batch_tokens = DEFAULT_BATCH_TOKENS if max_batch_tokens is None else max_batch_tokens
        self.positions = weights.positions
        self.vocabulary = weights.vocabulary
        self._weights = weights
        # Tables that are small and read for every token get aligned copies; the file's views may be unaligned.
        self._positions = np.array(weights.position_embeddings)
        segments = weights.token_type_embeddings
        self._segments = None if segments is None else np.array(segments)
        if segments is not None and len(segments) < 2:
            raise GraphError(f"expected 2 segment embeddings, one a side of the pair, got {len(segments)}")
        self._layers = _lay_out(weights)
        self._pooler = _dense(weights.pooler)
        self._classifier = _dense(weights.classifier)
        self._merged = _rows_are_independent(self._layers)
        self._activate = _ACTIVATIONS[weights.activation]
        self._workers = Workers(self.threads)
        self._scratch = threading.local()

    def logits(self, pairs: Sequence[PairEncoding], *, checkpoint: Callable[[], None] | None = None) -> Floats:
        """Score encoded pairs.

        Args:
            pairs: [N] encodings; ids below ``vocabulary``, at most ``positions`` tokens each.
            checkpoint: Called between batches in the caller's thread; what it raises ends the call.

        Returns:
            [N] float32 logits in input order.

        Raises:
            InputError: A pair is empty, too long, or holds an id that the model does not know.
        """
        result = np.empty(len(pairs), np.float32)
        lengths = checked_lengths(pairs, positions=self.positions, vocabulary=self.vocabulary)
        batches = _plan(lengths, budget=fair_budget(self.max_batch_tokens, sum(lengths), self.threads))

        def run(batch: list[int]) -> None:
            blas_limit.limit_worker()
            result[batch] = self._forward([pairs[index] for index in batch])

        with blas_limit():
            self._workers.run_all([functools.partial(run, batch) for batch in batches], checkpoint)
        return result

    def info(self) -> dict[str, object]:
        """What decides speed and the last bit of a logit, ready for JSON."""
        steerable = blas_limit.steerable
        return {
            "engine": self.name,
            "threads": self.threads,
            "max_batch_tokens": self.max_batch_tokens,
            "weights": self._weights.weight_scheme,
            "gemm": "merged" if self._merged else "per pair",
            "blas": blas_limit.describe(),
            "blas_steerable": steerable,
            "exact_across_batches": True,
            # A BLAS that splits a GEMM among threads of its own may sum in another order.
            "exact_across_threads": steerable,
        }

    def close(self) -> None:
        """End the worker threads."""
        self._workers.close()

    def _forward(self, pairs: list[PairEncoding]) -> Floats:
        """Logits of one batch, [N]; pairs of equal length must be neighbours."""
        # Mutated or extreme weights may overflow; the caller judges the logits, a worker never warns.
        with np.errstate(all="ignore"):
            spans = _spans([len(pair) for pair in pairs])
            x = self._embed(pairs)  # [T, H]
            for layer in self._layers[:-1]:
                x = self._encode(layer, x, spans)
            x = self._encode_first_rows(self._layers[-1], x, spans)  # [N, H]
            return np.concatenate([self._head(row[None]) for row in x])

    def _embed(self, pairs: list[PairEncoding]) -> Floats:
        weights = self._weights
        x = weights.word_embeddings.rows(np.concatenate([pair.input_ids for pair in pairs]))  # [T, H]
        if self._segments is not None:
            x += self._segments[np.concatenate([pair.token_type_ids for pair in pairs])]
        x += self._positions[np.concatenate([np.arange(len(pair)) for pair in pairs])]
        return _normalize(x, weights.embedding_norm)

    def _encode(self, layer: _Layer, x: Floats, spans: _Spans) -> Floats:
        """One whole layer, in place, [T, H] -> [T, H]."""
        rows = self._row_ranges(spans)
        qkv = self._apply(layer.projections[0], x, rows, "qkv")  # [T, H] -> [T, 3H]
        context = self._buffer("context", *x.shape)
        for first, last in spans.groups:
            self._attend(qkv, qkv, context, spans, first, last)
        x += self._apply(layer.attention_output, context, rows, "hidden")
        _normalize(x, layer.attention_norm)
        return self._feed_forward(layer, x, rows)

    def _encode_first_rows(self, layer: _Layer, x: Floats, spans: _Spans) -> Floats:
        """The last layer, of which only the [CLS] rows are needed: [T, H] -> [N, H]."""
        query, key_value = layer.projections
        kv = self._apply(key_value, x, self._row_ranges(spans), "qkv")  # [T, 2H]
        x = x[spans.starts]  # [T, H] -> [N, H]
        pairs = len(x)
        if self._merged and pairs == 1:
            # One row would take the matrix-vector path, which sums in another order than two rows do.
            x = np.repeat(x, 2, axis=0)
        rows = _merged_ranges(len(x)) if self._merged else [(row, row + 1) for row in range(pairs)]
        q = self._apply(query, x, rows, "query")
        context = self._buffer("context", *x.shape)
        context[pairs:] = 0
        for first, last in spans.groups:
            self._attend(q, kv, context, spans, first, last)
        x += self._apply(layer.attention_output, context, rows, "hidden")
        _normalize(x, layer.attention_norm)
        return self._feed_forward(layer, x, rows)[:pairs]

    def _attend(self, queries: Floats, keys: Floats, context: Floats, spans: _Spans, first: int, last: int) -> None:
        """Attention of the pairs ``first`` to ``last``, which are equally long, into ``context``.

        ``queries`` is [T, 3H] (the same matrix as ``keys``), or [N, H] with one row a pair. Heads are taken in
        blocks whose scores fit the cache; each (pair, head) is a product of its own, so blocks change no bit.
        """
        heads, size = self._weights.heads, self._weights.head_size
        hidden = heads * size
        length, start, count = spans.lengths[first], spans.starts[first], last - first
        k, v = (
            part.reshape(count, length, heads, size).transpose(0, 2, 1, 3)  # [n*L, H] -> [n, A, L, D]
            for part in _columns(keys[start : start + count * length, -2 * hidden :], 2)
        )
        if queries is keys:
            asked, begin = length, start
        else:
            asked, begin = 1, first
        rows = slice(begin, begin + count * asked)
        q = queries[rows, :hidden].reshape(count, asked, heads, size).transpose(0, 2, 1, 3)
        out = context[rows].reshape(count, asked, heads, size).transpose(0, 2, 1, 3)
        block = max(1, _SCORE_ELEMENTS // (count * asked * length))
        for head in range(0, heads, block):
            part = slice(head, head + block)
            scores = q[:, part] @ k[:, part].swapaxes(2, 3)  # [n, a, asked, L]
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            np.matmul(scores, v[:, part], out=out[:, part])
            out[:, part] /= total

    def _feed_forward(self, layer: _Layer, x: Floats, rows: list[tuple[int, int]]) -> Floats:
        """Intermediate and output dense with the residual, in place, range by range so that a tile stays cached."""
        for start, stop in rows:
            tile = x[start:stop]
            inner = self._buffer("inner", len(tile), layer.intermediate.weight.shape[1])
            np.matmul(tile, layer.intermediate.weight, out=inner)  # [t, H] -> [t, F]
            self._activate_tiles(inner, layer.intermediate.bias)
            hidden = self._buffer("hidden", *tile.shape)
            np.matmul(inner, layer.output.weight, out=hidden)  # [t, F] -> [t, H]
            hidden += layer.output.bias
            tile += hidden
            _normalize(tile, layer.output_norm)
        return x

    def _activate_tiles(self, x: Floats, bias: Floats) -> None:
        """Bias and activation in place, in tiles that stay in the L2 cache."""
        step = max(1, _TILE_ELEMENTS // x.shape[1])
        first, second = (self._buffer(name, step, x.shape[1]) for name in ("first", "second"))
        for start in range(0, len(x), step):
            tile = x[start : start + step]
            tile += bias
            self._activate(tile, first[: len(tile)], second[: len(tile)])

    def _head(self, row: Floats) -> Floats:
        """Pooler and classifier of one pair, [1, H] -> [1]: always this shape, so always the same bits."""
        pooled = row @ self._pooler.weight
        pooled += self._pooler.bias
        pooled = _POOLER_ACTIVATIONS[self._weights.pooler_activation](pooled)
        logit: Floats = (pooled @ self._classifier.weight + self._classifier.bias)[:, 0]
        return logit

    def _apply(self, dense: _Dense, x: Floats, rows: list[tuple[int, int]], name: str) -> Floats:
        """``x @ weight + bias`` into a buffer of this worker, one GEMM a range of rows."""
        result = self._buffer(name, len(x), dense.weight.shape[1])
        for start, stop in rows:
            np.matmul(x[start:stop], dense.weight, out=result[start:stop])
        result += dense.bias
        return result

    def _row_ranges(self, spans: _Spans) -> list[tuple[int, int]]:
        """Rows that go through one GEMM: the whole batch, or a pair each where merging would change bits."""
        if self._merged and spans.tokens > 1:
            return _merged_ranges(spans.tokens)
        return [(start, start + length) for start, length in zip(spans.starts, spans.lengths, strict=True)]

    def _buffer(self, name: str, rows: int, columns: int) -> Floats:
        """A [rows, columns] array of this worker thread, reused from layer to layer and call to call."""
        kept: Floats | None = getattr(self._scratch, name, None)
        if kept is None or kept.size < rows * columns:
            kept = np.empty(rows * columns, np.float32)
            setattr(self._scratch, name, kept)
        return kept[: rows * columns].reshape(rows, columns)


def _lay_out(weights: BertWeights) -> list[_Layer]:
    """Dense float32 weights as the forward pass wants them: Q, K, V fused and scaled, the factor 1/2 folded in."""
    scale = np.float32(1 / np.sqrt(weights.head_size))
    layers = []
    for index, layer in enumerate(weights.layers):
        q, k, v = (_dense(linear) for linear in (layer.query, layer.key, layer.value))
        q = _Dense(q.weight * scale, q.bias * scale)
        fused = (_fuse(q, k, v),) if index < len(weights.layers) - 1 else (q, _fuse(k, v))
        output = _dense(layer.output)
        if weights.activation == "gelu":
            output = _Dense(output.weight * np.float32(0.5), output.bias)  # exact: a power of two
        layers.append(
            _Layer(
                projections=fused,
                attention_output=_dense(layer.attention_output),
                attention_norm=layer.attention_norm,
                intermediate=_dense(layer.intermediate),
                output=output,
                output_norm=layer.output_norm,
            )
        )
    return layers


def _dense(linear: Linear) -> _Dense:
    return _Dense(linear.weight.dense(), linear.bias)


def _fuse(*parts: _Dense) -> _Dense:
    """Dense layers that read the same rows, side by side as one."""
    return _Dense(
        np.concatenate([part.weight for part in parts], axis=1), np.concatenate([part.bias for part in parts])
    )


def _plan(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Batches of indices, longest pair first, each within ``budget`` real tokens; a longer pair runs alone."""
    batches: list[list[int]] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or used + lengths[index] > budget:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += lengths[index]
    return batches


def _merged_ranges(rows: int) -> list[tuple[int, int]]:
    """Ranges of 2 to _GEMM_ROWS rows that cover 2 or more rows; a single row would take another path of the BLAS."""
    starts = list(range(0, rows, _GEMM_ROWS))
    if rows - starts[-1] == 1:
        starts[-1] -= 1
    return list(itertools.pairwise([*starts, rows]))


def _spans(lengths: list[int]) -> _Spans:
    starts = [0, *itertools.accumulate(lengths)][:-1]
    groups = []
    first = 0
    for _, run in itertools.groupby(lengths):
        last = first + sum(1 for _ in run)
        groups.append((first, last))
        first = last
    return _Spans(lengths, starts, groups)


def _columns(x: Floats, count: int) -> Iterator[Floats]:
    """``x`` cut into ``count`` equally wide column blocks, as views."""
    width = x.shape[1] // count
    return (x[:, i * width : (i + 1) * width] for i in range(count))


def _rows_are_independent(layers: list[_Layer]) -> bool:
    """Whether this BLAS gives a row of a merged GEMM the same bits for every number of rows and every place.

    Equal rows must come out equal, within one product and between products of 2 rows up to the largest that
    runs, for the shape of every weight that runs merged. One row is never asked for: it takes another path.
    """
    shapes = {
        dense.weight.shape
        for layer in layers
        for dense in (*layer.projections, layer.attention_output, layer.intermediate, layer.output)
    }
    with blas_limit():
        return all(_is_independent(*shape) for shape in sorted(shapes))


@functools.cache
def _is_independent(inputs: int, outputs: int) -> bool:
    """The probe for one shape of weight; the answer belongs to the BLAS, so a process asks once."""
    random = np.random.default_rng(0)
    weight = random.random((inputs, outputs), np.float32) - np.float32(0.5)
    row = random.random(inputs, np.float32) - np.float32(0.5)
    most = np.repeat(row[None], _PROBE_ROWS[-1], axis=0)
    expected = (most[:2] @ weight)[0].view(np.uint32)
    return all(bool(((most[:rows] @ weight).view(np.uint32) == expected).all()) for rows in _PROBE_ROWS)


def _normalize(x: Floats, norm: Norm) -> Floats:
    """Layer normalization of each row, in place: (x - mean) / sqrt(variance + epsilon) * weight + bias.

    Source: Ba, Kiros, Hinton 2016, equation 4; the variance is the biased one.
    """
    x -= x.mean(axis=1, keepdims=True)
    variance = np.einsum("ij,ij->i", x, x)
    variance /= np.float32(x.shape[1])
    variance += np.float32(norm.epsilon)
    np.sqrt(variance, out=variance)
    np.reciprocal(variance, out=variance)
    x *= variance[:, None]
    x *= norm.weight
    x += norm.bias
    return x


def double_gelu(x: Floats, square: Floats, poly: Floats) -> None:
    """Twice the exact (erf) GELU of ``x``, in place: x * (1 + erf(x / sqrt(2))).

    The caller halves the weight that reads the result, which is exact and saves a pass.

    Args:
        x: Any shape; overwritten with the result.
        square: Work space of the same shape.
        poly: Work space of the same shape.

    Source: Hendrycks and Gimpel 2016, section 2; erf(x / sqrt(2)) as tanh of an odd polynomial (_GELU_ODD),
    absolute error of the halved result <= 6.6e-8 before float32 rounding.
    """
    np.multiply(x, x, out=square)
    np.multiply(square, _GELU_ODD[-1], out=poly)
    for coefficient in _GELU_ODD[-2:0:-1]:
        poly += coefficient
        poly *= square
    poly += _GELU_ODD[0]
    poly *= x
    np.tanh(poly, out=poly)
    poly *= x
    x += poly


def _relu(x: Floats, _first: Floats, _second: Floats) -> None:
    np.maximum(x, np.float32(0), out=x)


_ACTIVATIONS: dict[str, Callable[[Floats, Floats, Floats], None]] = {"gelu": double_gelu, "relu": _relu}
_POOLER_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
}
