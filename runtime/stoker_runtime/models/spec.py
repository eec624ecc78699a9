"""The description of a decoder: sizes, rotary embedding, norms, biases and the parameters that follow from them.

Invariants: frozen plain data without torch, so that the fit arithmetic can use it; `parameters()` is the one list
of final tensors, which allocation, loading, random weights and byte counts all walk.
Knows nothing of checkpoints, of devices, or of how a parameter is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from stoker_runtime.models.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.integer_scheme import IN_SITU, IntegerScheme

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

# Parameters start at multiples of this many bytes: vector loads and TMA descriptors want aligned addresses.
ALIGNMENT = 256
# Rows and columns of a matrix that share a scale under fp8_block.
BLOCK = 128


class Role(StrEnum):
    """What a parameter is used for: decides how it is stored and how random weights are drawn."""

    EMBEDDING = "embedding"
    LINEAR = "linear"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One final tensor: `layers.3.qkv`, its shape (`[out, in]` for a linear), and its role.

    `kind` is how the checkpoint stores a linear: "" in 16 or 32 bits, to be quantized or not; "dense" likewise, never
    to be quantized; or fp8_channel, fp8_block, int4, int8, the last two with their `scheme`.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: str = ""
    scheme: IntegerScheme | None = None

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: the base, the rotated dimensions of a head, and the scaling of its frequencies.

    `kind` is default, linear, dynamic, llama3, yarn, longrope or factors (explicit divisors, in `short_factor`).
    `attention_factor` multiplies cos and sin. Fields a kind does not use keep their defaults.
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention and a gated feed-forward.

    `windows[i]` is the number of keys a query of layer i sees, itself included; 0 = all of them.
    `checkpoint`: how its linears are quantized already, all but those in `dense_parameters`. `dtype`
    is that of the rest. `max_position` is the longest context the rotary table is right for.
    """

    architecture: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: RopeSpec
    activation: str
    windows: tuple[int, ...]
    max_position: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    checkpoint: Fp8Checkpoint | IntegerCheckpoint | None = None
    dense_parameters: frozenset[str] = frozenset()

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """What the product of a query and a key is multiplied with before the softmax."""
        return float(self.head_dim**-0.5)

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        """The parameters of one layer, in the order they are used."""
        qkv_size = self.q_size + 2 * self.kv_size
        rows: list[tuple[str, tuple[int, ...], Role, bool]] = [
            ("input_norm", (self.hidden,), Role.NORM, True),
            ("qkv", (qkv_size, self.hidden), Role.LINEAR, True),
            ("qkv_bias", (qkv_size,), Role.BIAS, self.qkv_bias),
            ("q_norm", (self.head_dim,), Role.NORM, self.qk_norm),
            ("k_norm", (self.head_dim,), Role.NORM, self.qk_norm),
            ("output", (self.hidden, self.q_size), Role.LINEAR, True),
            ("output_bias", (self.hidden,), Role.BIAS, self.output_bias),
            ("post_norm", (self.hidden,), Role.NORM, True),
            ("gate_up", (2 * self.ffn, self.hidden), Role.LINEAR, True),
            ("gate_up_bias", (2 * self.ffn,), Role.BIAS, self.ffn_bias),
            ("down", (self.hidden, self.ffn), Role.LINEAR, True),
            ("down_bias", (self.hidden,), Role.BIAS, self.ffn_bias),
        ]
        for field, shape, role, present in rows:
            if present:
                name = f"layers.{layer}.{field}"
                kind = self._stored_kind(name) if role is Role.LINEAR else ""
                held = self.checkpoint if kind.startswith("int") else None
                scheme = held.scheme if isinstance(held, IntegerCheckpoint) else None
                yield Parameter(name, shape, role, kind, scheme)

    def _stored_kind(self, name: str) -> str:
        if self.checkpoint is None:
            return ""
        return "dense" if name in self.dense_parameters else self.checkpoint.kind

    def parameters(self) -> Iterator[Parameter]:
        """Every final tensor, in the order the forward pass uses them."""
        yield Parameter("embed", (self.vocab, self.hidden), Role.EMBEDDING)
        for layer in range(self.num_layers):
            yield from self.layer_parameters(layer)
        yield Parameter("final_norm", (self.hidden,), Role.NORM)
        if not self.tie_embeddings:
            yield Parameter("head", (self.vocab, self.hidden), Role.HEAD)

    def parameter_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Device bytes of all weights, exactly as allocated: every tensor padded to ALIGNMENT."""
        return sum(stored_bytes(parameter, dtype, quantization) for parameter in self.parameters())

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of keys and values that one token holds over all layers."""
        return 2 * self.num_layers * self.kv_size * ITEM_BYTES[kv_dtype]

    def rope_table_bytes(self, max_model_len: int) -> int:
        """Bytes of the rotary table for contexts of up to `max_model_len` tokens."""
        return max_model_len * self.rope.dim * ITEM_BYTES["float32"]


def stored_kind(parameter: Parameter, quantization: str) -> str:
    """How this parameter rests in memory: dense, fp8_channel, fp8_block, int4 or int8.

    Embedding and output head keep 16 bits.
    """
    if parameter.kind:
        return parameter.kind
    if parameter.role is not Role.LINEAR:
        return "dense"
    return {"fp8": "fp8_channel", "w4": IN_SITU.kind}.get(quantization, "dense")


def stored_scheme(parameter: Parameter) -> IntegerScheme:
    """The scheme of a parameter whose stored kind is int4 or int8: its checkpoint's, or that of quantizing at load."""
    return parameter.scheme or IN_SITU


def scale_count(parameter: Parameter, kind: str) -> int:
    """Number of fp32 scales of a linear of an fp8 kind."""
    rows, columns = parameter.shape
    return rows if kind == "fp8_channel" else -(-rows // BLOCK) * -(-columns // BLOCK)


def aligned(size: int) -> int:
    """`size` bytes rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def stored_bytes(parameter: Parameter, dtype: str, quantization: str) -> int:
    """Device bytes of one parameter, padding included; quantized ones have their scales besides."""
    kind = stored_kind(parameter, quantization)
    if kind == "dense":
        return aligned(parameter.elements * ITEM_BYTES[dtype])
    if kind.startswith("int"):
        n, k = parameter.shape
        return sum(map(aligned, stored_scheme(parameter).sizes(n, k, ITEM_BYTES[dtype])))
    return aligned(parameter.elements * ITEM_BYTES["fp8"]) + aligned(scale_count(parameter, kind) * 4)
