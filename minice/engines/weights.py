"""The weights of a BERT cross-encoder, and the plain way to compute with them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from minice.engines.trace import erf

Activation = Literal["gelu", "relu"]
PoolerActivation = Literal["tanh", "relu"]
WeightScheme = Literal["fp32", "int8-weight-only"]
WeightValues = NDArray[np.float32] | NDArray[np.int8]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matrix:
    """The weight of a dense layer as it lies in the file.

    Attributes:
        values: [in, out], or [out, in] if ``transposed``; float32 or int8. A view of the file's bytes,
            so it may be unaligned: good for reading, slow as an operand.
        scale: [out] float32 factor of each output channel of int8 values; None with float32.
        transposed: The file holds [out, in].
        name: What the file calls the tensor.
    """

    values: WeightValues
    scale: NDArray[np.float32] | None = None
    transposed: bool = False
    name: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out)."""
        rows, columns = self.values.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def dense(self) -> NDArray[np.float32]:
        """Return a fresh, aligned, C-contiguous [in, out] array of float32."""
        dense = np.empty(self.shape, np.float32)
        values = self.values.T if self.transposed else self.values
        if self.scale is None:
            dense[...] = values
        else:
            np.multiply(values, self.scale, out=dense, dtype=np.float32)
        return dense


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """An embedding table as it lies in the file.

    Attributes:
        values: [V, H] float32 or int8; a C-contiguous view of the file's bytes, perhaps unaligned.
        scale: [V, 1] float32 factor of each row of int8 values; None with float32.
        name: What the file calls the tensor.
    """

    values: WeightValues
    scale: NDArray[np.float32] | None = None
    name: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        rows, columns = self.values.shape
        return rows, columns

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows of ``ids`` [T], each in 0..V-1, as a fresh [T, H] float32 array."""
        # Not take(): that copies the whole of an unaligned table.
        taken = self.values[ids]
        if self.scale is None:
            return np.asarray(taken, np.float32)
        return np.asarray(np.multiply(taken, self.scale[ids], dtype=np.float32))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """``x @ weight + bias``; bias is [out] float32, aligned."""

    weight: Matrix
    bias: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """Layer normalization: weight and bias are [H] float32, aligned; epsilon is added to the variance."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    epsilon: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerWeights:
    """One encoder layer: ``y = attention_norm(x + attention(x)); output_norm(y + feed_forward(y))``."""

    query: Linear
    key: Linear
    value: Linear
    attention_output: Linear
    attention_norm: Norm
    intermediate: Linear
    output: Linear
    output_norm: Norm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BertWeights:
    """A BERT encoder with a one-logit head.

    Attributes:
        word_embeddings: [V, H].
        position_embeddings: [P, H] float32.
        token_type_embeddings: [S, H] float32; None where the model has no segments (DistilBERT).
        embedding_norm: Of the sum of the three.
        layers: Encoder layers, first to last.
        pooler: [H, H], applied to the first token of the last layer.
        pooler_activation: Between pooler and classifier.
        classifier: [H, 1]; its output is the logit.
        heads: A; attention scores are scaled by 1 / sqrt(H / A).
        activation: Between a layer's intermediate and output; "gelu" is the exact erf form.
    """

    word_embeddings: Table
    position_embeddings: NDArray[np.float32]
    token_type_embeddings: NDArray[np.float32] | None
    embedding_norm: Norm
    layers: tuple[LayerWeights, ...]
    pooler: Linear
    pooler_activation: PoolerActivation
    classifier: Linear
    heads: int
    activation: Activation

    @property
    def hidden(self) -> int:
        """H."""
        return self.word_embeddings.shape[1]

    @property
    def head_size(self) -> int:
        """D = H / A."""
        return self.hidden // self.heads

    @property
    def positions(self) -> int:
        """P: the longest pair in tokens."""
        return len(self.position_embeddings)

    @property
    def vocabulary(self) -> int:
        """V: token ids are 0..V-1."""
        return self.word_embeddings.shape[0]

    @property
    def segments(self) -> int:
        """S: token types are 0..S-1; 0 where the model has none."""
        return 0 if self.token_type_embeddings is None else len(self.token_type_embeddings)

    @property
    def weight_scheme(self) -> WeightScheme:
        """ "int8-weight-only" if any weight is stored as int8, else "fp32"."""
        quantized = self.word_embeddings.scale is not None or any(x.weight.scale is not None for x in self.linears())
        return "int8-weight-only" if quantized else "fp32"

    def linears(self) -> Iterator[Linear]:
        """Yield every dense layer."""
        for layer in self.layers:
            yield from (layer.query, layer.key, layer.value, layer.attention_output, layer.intermediate, layer.output)
        yield from (self.pooler, self.classifier)

    def norms(self) -> Iterator[Norm]:
        """Yield every layer normalization."""
        yield self.embedding_norm
        for layer in self.layers:
            yield from (layer.attention_norm, layer.output_norm)


Pairs = Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]


def reference_logits(weights: BertWeights, pairs: Pairs) -> NDArray[np.float32]:
    """Score pairs as the textbook has it: slow, plain, and what faster code is compared with.

    Args:
        weights: The model.
        pairs: (input_ids [T], token_type_ids [T]) of each pair.

    Returns:
        [N] float32 logits.
    """
    starts = np.cumsum([0, *(len(ids) for ids, _ in pairs[:-1])])
    return reference_head(weights, reference_states(weights, pairs)[starts])  # [T of all pairs, H] -> [N, H] -> [N]


def reference_head(weights: BertWeights, first: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the logits [N] of the first tokens' last hidden states, [N, H]."""
    pooled = _applied(first, weights.pooler)
    pooled = np.tanh(pooled) if weights.pooler_activation == "tanh" else np.maximum(pooled, 0)
    return np.asarray(_applied(pooled, weights.classifier)[:, 0])


def reference_states(weights: BertWeights, pairs: Pairs) -> NDArray[np.float32]:
    """Return the last layer's hidden states, [T of all pairs, H]; see ``reference_logits``.

    Source: Devlin et al., "BERT", arXiv:1810.04805, section 3; Vaswani et al., arXiv:1706.03762, section 3.
    """
    ends = np.cumsum([len(ids) for ids, _ in pairs])
    spans = [slice(end - len(ids), end) for end, (ids, _) in zip(ends, pairs, strict=True)]
    x = weights.word_embeddings.rows(np.concatenate([ids for ids, _ in pairs]))  # [T of all pairs, H]
    x = x + weights.position_embeddings[np.concatenate([np.arange(len(ids)) for ids, _ in pairs])]
    if weights.token_type_embeddings is not None:
        x = x + weights.token_type_embeddings[np.concatenate([types for _, types in pairs])]
    x = _normalized(x, weights.embedding_norm)
    for layer in weights.layers:
        q, k, v = (_applied(x, linear) for linear in (layer.query, layer.key, layer.value))
        context = np.concatenate([_attention(q[span], k[span], v[span], weights.heads) for span in spans])
        x = _normalized(x + _applied(context, layer.attention_output), layer.attention_norm)
        inner = _applied(x, layer.intermediate)  # [T, H] -> [T, F]
        inner = np.maximum(inner, 0) if weights.activation == "relu" else _gelu(inner)
        x = _normalized(x + _applied(inner, layer.output), layer.output_norm)  # [T, F] -> [T, H]
    return x


def _applied(x: NDArray[np.float32], linear: Linear) -> NDArray[np.float32]:
    return np.asarray(x @ linear.weight.dense() + linear.bias)


def _normalized(x: NDArray[np.float32], norm: Norm) -> NDArray[np.float32]:
    centered = x - x.mean(axis=1, keepdims=True)
    variance = np.square(centered).mean(axis=1, keepdims=True)
    return np.asarray(centered / np.sqrt(variance + np.float32(norm.epsilon)) * norm.weight + norm.bias)


def _attention(
    q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32], heads: int
) -> NDArray[np.float32]:
    q, k, v = (x.reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (q, k, v))  # [T, H] -> [A, T, D]
    scores = q @ k.transpose(0, 2, 1) / np.float32(math.sqrt(q.shape[2]))  # [A, T, T]
    powers = np.exp(scores - scores.max(axis=2, keepdims=True))
    context = powers / powers.sum(axis=2, keepdims=True) @ v  # [A, T, D]
    return np.asarray(context.transpose(1, 0, 2).reshape(context.shape[1], -1))  # [T, H]


def _gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(np.float32)
