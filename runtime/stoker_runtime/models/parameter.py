"""One final tensor of a model: its shape, what it is for, how it rests in memory and what that takes.

Invariants: frozen plain data without torch, so that the fit arithmetic can use it; bytes are counted exactly as they
are allocated.
Knows nothing of which tensors a model has, of checkpoints' names, or of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND, experts_sizes
from stoker_runtime.models.quantization.integer_scheme import IN_SITU
from stoker_runtime.models.quantization.schemes import Scheme, is_packed

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

# Parameters start at multiples of this many bytes: vector loads and TMA descriptors want aligned addresses.
ALIGNMENT = 256
# Rows and columns of a matrix that share a scale under fp8_block.
BLOCK = 128


class Role(StrEnum):
    """What a parameter is used for: decides how it is stored and how random weights are drawn.

    A gain is the weight of a norm within a layer, to which no model's `norm_offset` is added.
    """

    EMBEDDING = "embedding"
    LINEAR = "linear"
    EXPERTS = "experts"
    ROUTER = "router"
    LATENT = "latent"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    GAIN = "gain"


# What is quantized, by a checkpoint or at load.
QUANTIZED = (Role.LINEAR, Role.EXPERTS)
# What kernels read in fp32: extra logits of attention, and what moves the choice of experts, or how long a state is
# kept, by less than 16 bits tell.
EXACT = (".sinks", ".correction_bias", ".a_log", ".skip", ".dt_bias")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One final tensor: `layers.3.qkv`, its shape (`[out, in]` for a linear), and its role.

    `dtype` is its own where it is not the model's. `kind` is how the checkpoint stores a linear: "" in 16 or 32 bits,
    to be quantized or not; "dense" likewise, never to be quantized; or fp8_channel, fp8_block, int8_channel; or int4,
    int8, nvfp4, mxfp4, with their `scheme`; or mxfp4_experts; or blocks, with the parts of it. `at_load` is what it
    becomes at load, by a setting of its own.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    kind: str = ""
    scheme: Scheme | None = None
    dtype: str = ""
    blocks: tuple[BlockPart, ...] = ()
    at_load: str = ""

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.shape)


def stored_kind(parameter: Parameter, quantization: str) -> str:
    """How this parameter rests in memory: dense, a kind that a checkpoint has, or what it becomes at load.

    Embedding and output head keep 16 bits, unless the latter is to be quantized by itself. Experts in MXFP4 stay so,
    unless nothing shall be quantized.
    """
    if parameter.kind == EXPERTS_KIND and quantization == "none":
        return "dense"
    if parameter.kind or parameter.at_load:
        return parameter.kind or parameter.at_load
    if parameter.role not in QUANTIZED:
        return "dense"
    return {"fp8": "fp8_channel", "w4": IN_SITU.kind}.get(quantization, "dense")


def stored_scheme(parameter: Parameter) -> Scheme:
    """The scheme of a parameter whose stored kind is packed: its checkpoint's, or that of quantizing at load."""
    return parameter.scheme or IN_SITU


def scale_count(parameter: Parameter, kind: str) -> int:
    """Number of fp32 scales of a linear of an fp8 kind, or of int8_channel."""
    rows, columns = parameter.shape
    return rows if kind != "fp8_block" else -(-rows // BLOCK) * -(-columns // BLOCK)


def aligned(size: int) -> int:
    """`size` bytes rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def stored_bytes(parameter: Parameter, dtype: str, quantization: str) -> int:
    """Device bytes of one parameter, padding included; quantized ones have their scales besides."""
    kind = stored_kind(parameter, quantization)
    if kind == "dense":
        return aligned(parameter.elements * ITEM_BYTES[parameter.dtype or dtype])
    if kind == "blocks":
        return sum(aligned(part.num_bytes) for part in parameter.blocks)
    if kind == EXPERTS_KIND:
        return sum(map(aligned, experts_sizes(parameter.shape, "mxfp4")))
    if is_packed(kind):
        n, k = parameter.shape
        scheme = stored_scheme(parameter)
        if parameter.role is Role.EXPERTS:
            return sum(map(aligned, scheme.experts_sizes(n, k, ITEM_BYTES[dtype])))
        return sum(map(aligned, scheme.sizes(n, k, ITEM_BYTES[dtype])))
    return aligned(parameter.elements * ITEM_BYTES["fp8"]) + aligned(scale_count(parameter, kind) * 4)
