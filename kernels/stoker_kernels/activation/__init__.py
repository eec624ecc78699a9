"""Activations: plain (gelu, silu, relu), gated (silu·mul, gelu·mul, gelu of bounded values·mul), with FP8 quantization
where fused; soft-caps.

Must never know: which layer asks. A new activation: a function in `reference.py` and in `triton_activation.py`, and its
name in `op.py`.
"""

from stoker_kernels.activation.op import (
    clamped_gelu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    relu,
    relu2,
    scale_and_cap,
    sigmoid_mul,
    silu,
    silu_and_mul,
    silu_and_mul_quant,
)

__all__ = [
    "clamped_gelu_and_mul",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "relu",
    "relu2",
    "scale_and_cap",
    "sigmoid_mul",
    "silu",
    "silu_and_mul",
    "silu_and_mul_quant",
]
