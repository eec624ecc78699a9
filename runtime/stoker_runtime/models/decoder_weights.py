"""The parameters of a decoder as its forward reads them, layer by layer.

Invariants: views of memory that others own; nothing here allocates or copies.
Knows nothing of files and formats, nor of where the memory lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker_kernels.moe import ExpertWeights
from stoker_kernels.quant import AnyWeight, BlockWeight, Fp4Weight, IntegerWeight, LinearWeight


def linear_form(weight: AnyWeight) -> tuple[object, ...]:
    """What kernels tell apart of a weight, whatever its shape."""
    if isinstance(weight, Fp4Weight):
        return (weight.kind, weight.layout)
    if not isinstance(weight, IntegerWeight):
        return (weight.kind,)
    return (weight.kind, weight.group, weight.zero is None, weight.order is None, weight.layout)


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts: the router `[E, H]`, its biases `[E]`, and the gate `[1, H]` of the shared expert.

    `staged`: where on the device those of `experts` that rest in host memory are copied to; None: they do not.
    """

    router: LinearWeight
    experts: ExpertWeights
    router_bias: Tensor | None = None
    correction_bias: Tensor | None = None
    shared_gate: LinearWeight | None = None
    staged: ExpertWeights | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Latent attention: what widens narrow queries, `[H·(N+P), q_rank]`, and latents, `[H, N+V, R]`; their norms.

    Where queries are not narrowed the first two are None.
    """

    q_norm: Tensor | None
    q_b: AnyWeight | None
    kv_norm: Tensor
    kv_b: Tensor


@dataclass(frozen=True, slots=True)
class StateWeights:
    """A layer with a state: the convolution `[C, W]` and its bias, what decides how much is forgotten, `[H]` fp32, and
    the norm of what comes of it. `skip`, of Mamba-2 alone, lets a head's input through beside its state. `gates`
    projects what the delta rule learns and forgets by, unless the layer's first matrix does.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    conv_bias: Tensor | None = None
    skip: Tensor | None = None
    gates: AnyWeight | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` stacks the rows of Q, K and V, with `latent` those of queries and of what is cached; with
    `state` it is all that this reads; `gate_up` those of gate and up; linears are `[out, in]`.

    A feed-forward without a gate has its one matrix in `gate_up`. Beside a mixture of experts `gate_up` and `down` are
    those of the shared expert. What a model does not have is None.
    """

    qkv: AnyWeight | None
    output: AnyWeight | None
    gate_up: AnyWeight | None
    down: AnyWeight | None
    mixture: MixtureWeights | None = None
    latent: LatentWeights | None = None
    state: StateWeights | None = None
    input_norm: Tensor | None = None
    embed_norm: Tensor | None = None
    hidden_norm: Tensor | None = None
    join: Tensor | None = None
    input_norm_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    output_bias: Tensor | None = None
    attention_post_norm: Tensor | None = None
    ffn_norm: Tensor | None = None
    ffn_norm_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    ffn_post_norm: Tensor | None = None

    @property
    def ffn_reader(self) -> AnyWeight | None:
        """The weight in whose form the feed-forward's input is wanted; None for a mixture's, whose router reads it."""
        return self.gate_up if self.mixture is None else None

    @property
    def reader(self) -> AnyWeight | None:
        """The weight in whose form the layer's input is wanted: of what brings tokens together, where it does; of two
        that read it the one in 16 bits.
        """
        if self.state is not None and self.state.gates is not None:
            return self.state.gates
        return self.ffn_reader if self.qkv is None else self.qkv

    @property
    def feeds(self) -> bool:
        """Whether there is a feed-forward."""
        return self.down is not None or self.mixture is not None

    @property
    def linears(self) -> tuple[AnyWeight, ...]:
        """The layer's matrices, those of experts apart."""
        widens = None if self.latent is None else self.latent.q_b
        return tuple(each for each in (self.qkv, widens, self.output, self.gate_up, self.down) if each is not None)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of a decoder: `embed` and `head` are `[V, H]`, and the same memory when the embedding is tied.

    `kv_scales` `[layers, 2, Hkv]` fp32 are what keys and values of an e4m3 cache are multiplied by; None: by 1.
    `positions` `[P, H]` are learned ones, that are added to the embedding; `embed_norm` `[H]` norms it. `fuse` is
    of a head that drafts: it brings what is read of the model to one vector. Its layer norms that by `hidden_norm`, and
    may `join` it with an embedding.
    """

    embed: Tensor | BlockWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: AnyWeight
    kv_scales: Tensor | None = None
    positions: Tensor | None = None
    embed_norm: Tensor | None = None
    embed_norm_bias: Tensor | None = None
    final_norm_bias: Tensor | None = None
    head_bias: Tensor | None = None
    fuse: AnyWeight | None = None

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the logits of a model of `dtype`: fp32 where the head is packed for a CPU, as its sums are that anyway.

        bf16 knows a logit of 20 to an eighth, so that two tokens are often one.
        """
        return torch.float32 if isinstance(self.head, BlockWeight) and self.head.packed else dtype
