"""The parameters of a decoder as its forward reads them, layer by layer.

Invariants: views of memory that others own; nothing here allocates or copies.
Knows nothing of files and formats, nor of where the memory lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker_kernels.quant import AnyWeight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` stacks the rows of Q, K and V, `gate_up` those of gate and up; linears are `[out, in]`."""

    input_norm: Tensor
    qkv: AnyWeight
    output: AnyWeight
    post_norm: Tensor
    gate_up: AnyWeight
    down: AnyWeight
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of a decoder: `embed` and `head` are `[V, H]`, and the same memory when the embedding is tied.

    `kv_scales` `[layers, 2, Hkv]` fp32 are what keys and values of an e4m3 cache are multiplied by; None: by 1.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: AnyWeight
    kv_scales: Tensor | None = None
