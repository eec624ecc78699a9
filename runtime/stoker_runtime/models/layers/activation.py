"""What stands between a feed-forward's two products: the activation, quantized at once for a product that reads so.

Invariants: which function runs depends on the spec and on what `down` reads, never on values.
Knows nothing of weights or of what is around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stoker_kernels.activation import (
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
    relu2,
    relu2_quant,
    silu,
    silu_and_mul,
    silu_and_mul_quant,
)
from stoker_kernels.quant import Quantized
from stoker_runtime.models.spec import ModelSpec

Floats = Callable[[Tensor], Tensor]
Eight = Callable[[Tensor, torch.dtype], Quantized]
GATED: dict[str, tuple[Floats, Eight]] = {
    "silu": (silu_and_mul, silu_and_mul_quant),
    "gelu": (gelu_and_mul, gelu_and_mul_quant),
    "gelu_tanh": (gelu_tanh_and_mul, gelu_tanh_and_mul_quant),
}
# Where there is none that quantizes, `linear` quantizes its input itself.
PLAIN: dict[str, tuple[Floats, Eight | None]] = {
    "silu": (silu, None),
    "gelu": (gelu, gelu_quant),
    "gelu_tanh": (gelu_tanh, gelu_tanh_quant),
    "relu2": (relu2, relu2_quant),
}


class Activation:
    """The activation of one model's feed-forwards."""

    def __init__(self, spec: ModelSpec) -> None:
        self.swiglu = spec.gated and spec.activation == "silu"
        """Whether gate and up can be one op with it."""
        self._floats: Floats
        self._eight: Eight | None
        if spec.activation == "clamped_gelu":
            self._floats = partial(clamped_gelu_and_mul, limit=spec.activation_limit)
            self._eight = partial(_clamped, limit=spec.activation_limit)
        else:
            self._floats, self._eight = (GATED if spec.gated else PLAIN)[spec.activation]

    def __call__(self, x: Tensor, into: torch.dtype | None) -> Tensor | Quantized:
        """`[T, 2F]`, or `[T, F]` without a gate, → `[T, F]`: in the dtype of `x`, or quantized to `into` where `down`
        reads eight bits.
        """
        return self._floats(x) if into is None or self._eight is None else self._eight(x, into)


def _clamped(x: Tensor, into: torch.dtype, *, limit: float) -> Quantized:
    return clamped_gelu_and_mul_quant(x, limit, into)
