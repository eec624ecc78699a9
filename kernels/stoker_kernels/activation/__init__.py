"""Activations: plain (gelu, silu, relu) and gated (silu·mul, gelu·mul), with FP8 quantization where it is fused.

A new activation: `op.py`, `reference.py`, `triton_activation.py`.
"""

from stoker_kernels.activation.op import (
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    relu,
    silu,
    silu_and_mul,
    silu_and_mul_quant,
)

__all__ = [
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "relu",
    "silu",
    "silu_and_mul",
    "silu_and_mul_quant",
]
