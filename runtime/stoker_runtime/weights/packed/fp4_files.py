"""How compressed-tensors and ModelOpt files hold weights in NVFP4 and MXFP4: which tensors, of which shapes and types.

    compressed  weight_packed [N, K/2], weight_scale [N, K/block], weight_global_scale [1]: what scales are divided by
    ModelOpt    weight [N, K/2], weight_scale [N, K/block], weight_scale_2 []: what scales are multiplied by

Codes are bytes, the lower column in the lower half; scales are e4m3 under NVFP4, exponents in a byte under MXFP4, which
has no third tensor.
Invariants: `unpack` changes the place of bits, never their values; nothing here reads a file.
Knows nothing of where a weight goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.fp4_gemm import dequantize_fp4
from stoker_kernels.quant import Fp4Weight
from stoker_runtime.errors import ModelError
from stoker_runtime.models.quantization.fp4_checkpoint import Fp4Checkpoint, Fp4Layout
from stoker_runtime.weights.copy_lanes import PLAIN_DTYPES

_DATA = {Fp4Layout.COMPRESSED: "weight_packed", Fp4Layout.MODELOPT: "weight"}
_FACTOR = {Fp4Layout.COMPRESSED: "weight_global_scale", Fp4Layout.MODELOPT: "weight_scale_2"}
_SCALE = "weight_scale"
# Of activations, which keep 16 bits.
UNUSED = ("input_global_scale", "input_scale")


@dataclass(frozen=True, slots=True)
class UnpackedFp4:
    """An [N, K] weight: uint8 codes [N, K/2], scales [K/block, N] as bytes, and a factor fp32, one or of each row."""

    data: Tensor
    scale: Tensor
    factor: Tensor | None


def tensor_shapes(checkpoint: Fp4Checkpoint, n: int, k: int) -> dict[str, tuple[int, ...]]:
    """Suffix → shape of each tensor that an [n, k] weight must have. Raises ModelError where blocks are not filled."""
    block = checkpoint.scheme.columns(k)
    if k % block or k % 2:
        raise ModelError(f"rows of {k} columns fill no whole blocks of {block}", param="quantization_config")
    found: dict[str, tuple[int, ...]] = {_DATA[checkpoint.layout]: (n, k // 2), _SCALE: (n, k // block)}
    return found | ({_FACTOR[checkpoint.layout]: ()} if checkpoint.kind == "nvfp4" else {})


def encodings(checkpoint: Fp4Checkpoint, suffix: str) -> tuple[str, ...]:
    """safetensors' dtypes that a tensor may have."""
    if suffix == _DATA[checkpoint.layout]:
        return ("U8",)
    if suffix == _SCALE:
        return ("F8_E4M3",) if checkpoint.kind == "nvfp4" else ("U8", "F8_E8M0")
    return tuple(PLAIN_DTYPES)


def check_factor(factor: Tensor, name: str) -> None:
    """Raises ModelError, naming the tensor, for a factor that is no finite number above zero."""
    value = float(factor)
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"tensor {name} holds {value:g}; a scale is finite and above zero.")


def unpack(checkpoint: Fp4Checkpoint, tensors: Mapping[str, Tensor]) -> UnpackedFp4:
    """The bits of one weight."""
    data, scale = tensors[_DATA[checkpoint.layout]], tensors[_SCALE].view(torch.uint8).t()
    if checkpoint.kind == "mxfp4":
        return UnpackedFp4(data, scale, None)
    suffix = _FACTOR[checkpoint.layout]
    factor = tensors[suffix].view(1).float()
    return UnpackedFp4(data, scale, factor.reciprocal() if checkpoint.layout is Fp4Layout.COMPRESSED else factor)


def values(checkpoint: Fp4Checkpoint, tensors: Mapping[str, Tensor]) -> Tensor:
    """The numbers of one weight, fp32 [N, K]."""
    bits = unpack(checkpoint, tensors)
    factor = None if bits.factor is None else bits.factor.expand(len(bits.data)).contiguous()
    return dequantize_fp4(Fp4Weight(bits.data, bits.scale.contiguous(), factor, checkpoint.kind), torch.float32)


def in_order(pieces: Sequence[UnpackedFp4], rows: Tensor) -> UnpackedFp4:
    """Weights one behind the other as one, its rows those in the order `rows`."""
    factors = [piece.factor.expand(len(piece.data)) for piece in pieces if piece.factor is not None]
    return UnpackedFp4(
        torch.cat([piece.data for piece in pieces])[rows],
        torch.cat([piece.scale for piece in pieces], dim=1)[:, rows],
        torch.cat(factors)[rows] if factors else None,
    )
