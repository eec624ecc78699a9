"""Numbers in fewer bits: the types that quantized weights and activations travel in, and quantization to FP8.

Must never know: how a product is computed (`gemm`). A new kind of weight: `linear_weight.py`.
"""

import torch

from stoker_kernels.quant.block_planes import (
    PLANE_KINDS,
    STEP,
    TAIL,
    TAIL_PLACES,
    PlaneKind,
    PlaneRows,
    element_bits,
    place_planes,
    plane_row_bytes,
    plane_sizes,
    steps_and_tails,
)
from stoker_kernels.quant.block_weight import BLOCK_FORMATS, BlockRows, BlockWeight, block_row_bytes
from stoker_kernels.quant.fp4_bits import field_mask, place_codes, placed_codes, widened_scales, without_signs
from stoker_kernels.quant.fp4_weight import E2M1, FP4_BLOCKS, Fp4Kind, Fp4Weight, nearest_e2m1
from stoker_kernels.quant.int8_weight import Int8Weight
from stoker_kernels.quant.integer_weight import (
    IntegerWeight,
    integer_scale_shape,
    pack_rows,
    quantize_integers,
    unpack_rows,
)
from stoker_kernels.quant.layout import Layout, pair_rows, unpair_rows
from stoker_kernels.quant.linear_weight import BLOCK, FP8, WEIGHT_KINDS, LinearWeight, WeightKind, scale_shape
from stoker_kernels.quant.op import dequantize, quantize_fp8, quantize_int8_rows, quantize_weight
from stoker_kernels.quant.types import FP8_MAX, INT8_MAX, MIN_SCALE, Quantized, quantize_int8

AnyWeight = LinearWeight | IntegerWeight | BlockWeight | Fp4Weight | Int8Weight
"""The weight of a linear layer in any form that `gemm.linear` multiplies."""


def activation_type(weight: AnyWeight) -> torch.dtype | None:
    """The type of eight bits that products with a weight read activations in: `Quantized` of it; None: floats."""
    return torch.int8 if isinstance(weight, Int8Weight) else FP8 if weight.takes_quantized else None


__all__ = [
    "BLOCK",
    "BLOCK_FORMATS",
    "E2M1",
    "FP4_BLOCKS",
    "FP8",
    "FP8_MAX",
    "INT8_MAX",
    "MIN_SCALE",
    "PLANE_KINDS",
    "STEP",
    "TAIL",
    "TAIL_PLACES",
    "WEIGHT_KINDS",
    "AnyWeight",
    "BlockRows",
    "BlockWeight",
    "Fp4Kind",
    "Fp4Weight",
    "Int8Weight",
    "IntegerWeight",
    "Layout",
    "LinearWeight",
    "PlaneKind",
    "PlaneRows",
    "Quantized",
    "WeightKind",
    "activation_type",
    "block_row_bytes",
    "dequantize",
    "element_bits",
    "field_mask",
    "integer_scale_shape",
    "nearest_e2m1",
    "pack_rows",
    "pair_rows",
    "place_codes",
    "place_planes",
    "placed_codes",
    "plane_row_bytes",
    "plane_sizes",
    "quantize_fp8",
    "quantize_int8",
    "quantize_int8_rows",
    "quantize_integers",
    "quantize_weight",
    "scale_shape",
    "steps_and_tails",
    "unpack_rows",
    "unpair_rows",
    "widened_scales",
    "without_signs",
]
