"""The feed-forward as a mixture of experts: the router's logits, the choice, the experts, and what is shared.

Invariants: no branch on values and no wait for the device. `counts` says how many tokens each expert got in the last
step that ran, layer by layer; padding chooses no expert.
Knows nothing of attention, and of how the shared expert computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from stoker_kernels.gemm import linear
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.moe import (
    ExpertActivation,
    ExpertKind,
    Routing,
    Scoring,
    experts,
    keep_experts,
    mixture,
    route,
    scratch_bytes,
)
from stoker_runtime.models.decoder_weights import MixtureWeights
from stoker_runtime.models.layers.beside import Beside
from stoker_runtime.models.layers.staged import experts_of
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.parameter import Role, stored_kind
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.spec import ModelSpec

# Tokens of a step whose shared expert runs beside the chosen ones: fewer are one launch, more fill the GPU.
BESIDE = range(3, 257)


def expert_scratch(spec: ModelSpec, quantization: str, tokens: int, device: str) -> int:
    """Bytes that the experts of a layer take beside activations in a step of so many tokens."""
    moe, on_gpu = spec.moe, device.startswith("cuda") and torch.cuda.is_available()
    if moe is None or not on_gpu or not chip_of(sm_of(torch.device(device))).wgmma:
        return 0
    kinds = {stored_kind(each, quantization) for each in spec.parameters() if each.role is Role.EXPERTS}
    sizes, mean = (len(moe.here), moe.ffn, spec.hidden), tokens * moe.top_k / moe.experts
    named = {cast(ExpertKind, "mxfp4" if kind == EXPERTS_KIND else kind) for kind in kinds}
    return max((scratch_bytes(kind, sizes, mean, gated=spec.gated) for kind in named), default=0)


class Mixture:
    """The mixtures of one model's layers. `counts`: [layers, E] int32, rows of layers without one stay 0."""

    def __init__(self, spec: MoeSpec, num_layers: int, device: torch.device) -> None:
        self._limit = spec.limit
        self._held = spec.held
        self._routing = Routing(
            spec.top_k,
            cast(Scoring, spec.scoring),
            renormalize=spec.renormalize,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
            group_score="top2" if spec.group_top2 else "max",
            jitter=spec.jitter,
        )
        self._packed = replace(self._routing, packed=True)
        self.counts = torch.zeros((num_layers, spec.experts), dtype=torch.int32, device=device)
        self._beside = Beside(device)

    def of_layers(self, layers: Sequence[int]) -> Mixture:
        """The same for a model of these layers alone; it counts for itself."""
        few = copy(self)
        few.counts = torch.zeros_like(self.counts[: len(layers)])
        return few

    def forward(
        self, layer: int, weights: MixtureWeights, hidden: Tensor, slots: Tensor, shared: Callable[[], Tensor] | None
    ) -> Tensor:
        """`[T, H]` → `[T, H]`; slots `[T]` int64 are below 0 for padding, `shared` is the shared expert."""
        stacked = experts_of(weights, len(hidden) * self._routing.top_k)
        beside: Tensor | Callable[[], Tensor] | None = None
        if shared is not None:
            beside = self._beside.begin(shared) if len(hidden) in BESIDE else shared()
        logits = linear(hidden, weights.router, bias=weights.router_bias)
        gate = None if weights.shared_gate is None else linear(hidden, weights.shared_gate)
        activation: ExpertActivation = "clamped" if self._limit else "silu" if stacked.gated else "relu2"
        bias, counts = weights.correction_bias, self.counts[layer]
        routing = self._packed if stacked.in_four_bits else self._routing
        if self._held is None:
            return mixture(
                hidden, logits, routing, stacked, bias=bias, slot_mapping=slots, counts=counts,
                activation=activation, limit=self._limit, shared=beside, shared_gate=gate,
            )  # fmt: skip
        chosen = route(logits, routing, bias=bias, slot_mapping=slots, counts=counts)
        return experts(
            hidden, keep_experts(chosen, self._held.start, len(self._held)), stacked, activation=activation,
            limit=self._limit, shared=beside, shared_gate=gate,
        )  # fmt: skip
