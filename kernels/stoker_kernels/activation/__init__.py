"""Activations: plain (gelu, silu, relu), gated (silu·mul, gelu·mul, gelu of bounded values·mul), and those whose result
is quantized to FP8 or INT8 at once; soft-caps.

Must never know: which layer asks. A new activation: a function in `reference.py` and in `triton_activation.py`, and its
name in `op.py`; to be quantized at once, its kind in `triton_quantizing.py`.
"""

from stoker_kernels.activation.op import (
    clamped_gelu_and_mul,
    clamped_gelu_and_mul_quant,
    gelu,
    gelu_and_mul,
    gelu_and_mul_quant,
    gelu_quant,
    gelu_tanh,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_quant,
    gelu_tanh_quant,
    relu,
    relu2,
    relu2_quant,
    scale_and_cap,
    sigmoid_mul,
    silu,
    silu_and_mul,
    silu_and_mul_quant,
)

__all__ = [
    "clamped_gelu_and_mul",
    "clamped_gelu_and_mul_quant",
    "gelu",
    "gelu_and_mul",
    "gelu_and_mul_quant",
    "gelu_quant",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_quant",
    "gelu_tanh_quant",
    "relu",
    "relu2",
    "relu2_quant",
    "scale_and_cap",
    "sigmoid_mul",
    "silu",
    "silu_and_mul",
    "silu_and_mul_quant",
]
