"""The description of a mixture of experts: which layers have one, how wide it is, how a token's experts are chosen.

Invariants: frozen plain data without torch. What the fields mean is said by the op's own `Routing`, which they become.
Knows nothing of checkpoints and of the rest of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker_runtime.models.quantization.integer_scheme import IntegerScheme


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """`top_k` of `experts` feed-forwards of width `ffn` for each token, in `layers`.

    scoring, renormalize, scale, groups, top_groups, group_top2 (a group is worth its two best experts, not its best)
    and jitter say how they are chosen; `correction_bias` moves the choice and not the weights.
    Beside them runs an expert of width `shared_ffn` (0: none) for every token, times a gate where `shared_gate`.
    Experts have a gate where the model's feed-forwards have one (`ModelSpec.gated`), else relu². limit: 0 is SwiGLU
    with SiLU; else SwiGLU clamped to it. packing "mxfp4": checkpoints hold experts in four bits, and so do kernels,
    unless `quantization` is none.
    held: of a rank among several that has whole experts, those; None: all. hosted: the layers whose experts rest in
    host memory.
    """

    layers: frozenset[int]
    experts: int
    top_k: int
    ffn: int
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_top2: bool = False
    jitter: float = 0.0
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    limit: float = 0.0
    packing: str = ""
    held: range | None = None
    hosted: frozenset[int] = frozenset()

    @property
    def here(self) -> range:
        """The experts whose matrices are here."""
        return range(self.experts) if self.held is None else self.held

    def integer_problem(self, scheme: IntegerScheme, hidden: int) -> str | None:
        """Why these experts, of a model `hidden` wide, are not multiplied in integers of `scheme`; None: they are."""
        found = (scheme.experts_problem(columns) for columns in (hidden, self.ffn))
        return next((problem for problem in found if problem is not None), None)

    def of_layers(self, layers: Sequence[int]) -> MoeSpec:
        """The same for a model of these layers alone, in this order."""
        kept, hosted = (
            frozenset(place for place, layer in enumerate(layers) if layer in of) for of in (self.layers, self.hosted)
        )
        return replace(self, layers=kept, hosted=hosted)
