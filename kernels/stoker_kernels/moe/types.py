"""What mixtures of experts pass between router, experts and models: how is chosen, what was chosen, the weights.

Invariants: frozen; a `Routing` and an `ExpertWeights` are checked once, when they are made, so kernels need not.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stoker_kernels.moe.layouts.int4 import groups_of, pack_int4
from stoker_kernels.moe.layouts.mxfp4 import pack_mxfp4, quantize_mxfp4
from stoker_kernels.moe.layouts.nvfp4 import pack_nvfp4, quantize_nvfp4
from stoker_kernels.moe.steps import PLACES, steps_of
from stoker_kernels.quant import BLOCK, FP4_BLOCKS, FP8, quantize_int8, quantize_integers

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2"]
ExpertKind = Literal["dense", "fp8_channel", "fp8_block", "mxfp4", "int4", "nvfp4", "int8", "int8_channel"]
# "clamped": gate up to `limit`, up within ±limit, (up + 1) · gate · sigmoid(1.702 · gate). "relu2": max(up, 0)², of
# experts without a gate.
ExpertActivation = Literal["silu", "clamped", "relu2"]
CLAMPED_SLOPE = 1.702


def given(shared: Tensor | Callable[[], Tensor] | None, like: Tensor) -> Tensor | None:
    """What is shared, of `like`'s shape, asked for where it is a function. Raises ValueError for another shape."""
    found = shared() if callable(shared) else shared
    if found is not None and found.shape != like.shape:
        raise ValueError(f"shared is {tuple(found.shape)}, x is {tuple(like.shape)}")
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from its logits.

    `scoring`: softmax or sigmoid of the logits, or sparsemixer, which chooses one expert after the other and weighs
    each by a softmax over those left that lie within 2 · `jitter` of the best. `groups` > 1: only experts of the
    `top_groups` best groups may be chosen; a group is worth its best expert ("max"), or the sum of its two best.
    A correction bias moves the choice, never the weights. `renormalize`: the chosen weights add up to one. They are
    multiplied with `scale` at the end. Softmax over the chosen logits alone is softmax, renormalized.
    `packed` says that the experts' weights have four bits: a plan has tiles that suit these.
    Raises ValueError for a combination that has no meaning.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    jitter: float = 0.0
    packed: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1 or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_k} experts of {self.top_groups} of {self.groups} groups cannot be chosen")
        if self.scoring == "sparsemixer" and (self.groups > 1 or self.renormalize):
            raise ValueError("sparsemixer has neither groups nor weights that add up to one")

    def check(self, experts: int) -> None:
        """Raises ValueError where so many experts cannot be chosen from."""
        if experts % self.groups or self.top_k > experts // self.groups * self.top_groups:
            raise ValueError(
                f"{self.top_k} of {experts} experts in {self.top_groups} of {self.groups} groups cannot be chosen"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """The pairs of token and choice in the order of their experts, and the tiles that they make, on the device.

    order: [T·K] int32, the pair `token · K + choice` at each sorted position; pairs of no expert are left out.
    tiles: [n, 3] int32: expert, first and end of its sorted positions, at most `tokens` of them; none in unused ones.
    experts: among how many was chosen; a rank's plan has tiles of its own alone.
    """

    order: Tensor
    tiles: Tensor
    tokens: int
    experts: int


@dataclass(frozen=True, slots=True)
class Routes:
    """What was chosen: `ids` [T, K] int32, −1 for none, and `weights` [T, K] fp32; `plan` where kernels need it."""

    ids: Tensor
    weights: Tensor
    plan: Plan | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer, stacked.

    gate_up: [E, 2F, H], gate rows first; down: [E, H, F]; contiguous, of a float dtype, or e4m3 with fp32 scales:
    fp8_channel [E, 2F] and [E, H]; fp8_block [E, 2·⌈F/128⌉, ⌈H/128⌉] (gate and up blocked apart) and [E, ⌈H/128⌉,
    ⌈F/128⌉]. mxfp4: uint8 [E, 2F, H/2] and [E, H, F/2] with uint8 scales [E, steps of H, 2F, 8] and [E, steps of F, H,
    8], as `layouts/mxfp4.py` says. nvfp4: the same by `layouts/nvfp4.py`, and factors fp32 [E, 2F] and [E, H]. int4:
    codes of the same shapes, and of a float dtype scales beside zero points, [E, groups of H, 2F, 2] and [E, groups of
    F, H, 2], a group `group` columns, or 0: the whole row, as `layouts/int4.py` says. int8: the same scales of codes
    uint8 [E, 2F, H] and [E, H, F], as `layouts/int8.py` says. Biases: [E, 2F] and [E, H] or None. Experts without a
    gate have F rows in place of 2F throughout.
    int8_channel: int8 with the scales of fp8_channel. `hosted`: matrices and scales lie in host memory, and the
    device reads them over its link. Raises ValueError where they do not fit together.
    """

    gate_up: Tensor
    down: Tensor
    kind: ExpertKind = "dense"
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    group: int = 0
    gate_up_factor: Tensor | None = None
    down_factor: Tensor | None = None
    hosted: bool = False

    def __post_init__(self) -> None:
        experts, hidden, ffn = self.experts, self.hidden, self.ffn
        up = 2 * ffn if self.gated else ffn
        if tuple(self.gate_up.shape) != (experts, up, hidden // self._per_item):
            raise ValueError(f"gate_up is {tuple(self.gate_up.shape)}, down [E, H, F] = {tuple(self.down.shape)}")
        if not (self.gate_up.is_contiguous() and self.down.is_contiguous()):
            raise ValueError("the weights of experts are contiguous")
        expected = expert_scale_shapes(self.kind, experts, ffn, hidden, self.group, gated=self.gated)
        got = tuple(None if each is None else tuple(each.shape) for each in (self.gate_up_scale, self.down_scale))
        codes = torch.uint8 if self.in_four_bits or self.in_integers else FP8
        fits = self.gate_up.dtype == (torch.int8 if self.takes_int8 else codes)
        if got != expected or not (self.gate_up.is_floating_point() if self.kind == "dense" else fits):
            raise ValueError(f"{self.kind} experts of {self.gate_up.dtype} have scales {expected}, not {got}")
        factors = tuple(None if each is None else tuple(each.shape) for each in (self.gate_up_factor, self.down_factor))
        rows = ((experts, up), (experts, hidden)) if self.kind == "nvfp4" else (None, None)
        if factors != rows:
            raise ValueError(f"{self.kind} experts have factors {rows}, not {factors}")

    @property
    def gated(self) -> bool:
        """Whether experts have a gate beside what it opens."""
        return self.gate_up.shape[1] != self.ffn

    @property
    def takes_quantized(self) -> bool:
        """Whether products read activations in FP8."""
        return self.kind in ("fp8_channel", "fp8_block")

    @property
    def takes_int8(self) -> bool:
        """Whether products read activations in integers of eight bits."""
        return self.kind == "int8_channel"

    @property
    def in_four_bits(self) -> bool:
        """Whether codes are words of eight."""
        return self.kind in ("mxfp4", "int4", "nvfp4")

    @property
    def in_integers(self) -> bool:
        """Whether codes have zero points beside their scales."""
        return self.kind in ("int4", "int8")

    @property
    def _per_item(self) -> int:
        """Numbers in an item of the data."""
        return 2 if self.in_four_bits else 1

    @property
    def experts(self) -> int:
        """E."""
        return self.down.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.shape[1]

    @property
    def ffn(self) -> int:
        """F."""
        return self.down.shape[2] * self._per_item


def expert_scale_shapes(
    kind: ExpertKind, experts: int, ffn: int, hidden: int, group: int = 0, *, gated: bool = True
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Shapes of the scales of gate and up, and of down; int4 has them for groups of `group` columns."""
    parts = 2 if gated else 1
    if kind == "dense":
        return None, None
    if kind in ("fp8_channel", "int8_channel"):
        return (experts, parts * ffn), (experts, hidden)
    if kind in ("mxfp4", "nvfp4"):
        up, down = (len(steps_of(columns, FP4_BLOCKS[kind])) for columns in (hidden, ffn))
        return (experts, up, parts * ffn, PLACES), (experts, down, hidden, PLACES)
    if kind in ("int4", "int8"):
        return (experts, groups_of(group, hidden), parts * ffn, 2), (experts, groups_of(group, ffn), hidden, 2)
    wide, high = -(-ffn // BLOCK), -(-hidden // BLOCK)
    return (experts, parts * wide, high), (experts, high, wide)


def quantize_experts(weights: ExpertWeights, kind: ExpertKind, group: int = 0) -> ExpertWeights:
    """Dense experts in FP8, each of gate, up and down by itself as `quantize_weight` does it, in integers or FP4."""
    from stoker_kernels.quant import quantize_weight

    if kind == "dense":
        return weights
    if kind == "nvfp4":
        up, down = _in_nvfp4(weights.gate_up), _in_nvfp4(weights.down)
        made = (up[0], down[0], kind, up[1], down[1], weights.gate_up_bias, weights.down_bias)
        return ExpertWeights(*made, gate_up_factor=up[2], down_factor=down[2])
    if kind == "mxfp4":
        return _packed(weights, kind, _in_mxfp4(weights.gate_up), _in_mxfp4(weights.down), 0)
    if kind == "int4" or kind == "int8":
        bits = 4 if kind == "int4" else 8
        return _packed(
            weights, kind, _in_integers(weights.gate_up, bits, group), _in_integers(weights.down, bits, group), group
        )
    if kind == "int8_channel":
        made_up, made_down = quantize_int8(weights.gate_up), quantize_int8(weights.down)
        settings = (made_up[1][..., 0], made_down[1][..., 0], weights.gate_up_bias, weights.down_bias)
        return ExpertWeights(made_up[0], made_down[0], kind, *settings)
    gate_ups, downs, parts = [], [], 2 if weights.gated else 1
    for gate_up, down in zip(weights.gate_up, weights.down, strict=True):
        gate_ups.append([quantize_weight(half.contiguous(), kind) for half in gate_up.chunk(parts)])
        downs.append(quantize_weight(down, kind))
    data = torch.stack([torch.cat([half.data for half in halves]) for halves in gate_ups])
    scales = torch.stack([torch.cat([_scale(half.scale, kind) for half in halves]) for halves in gate_ups])
    down_scales = torch.stack([_scale(each.scale, kind) for each in downs])
    return ExpertWeights(
        data, torch.stack([each.data for each in downs]), kind, scales, down_scales,
        weights.gate_up_bias, weights.down_bias,
    )  # fmt: skip


def _packed(
    weights: ExpertWeights, kind: ExpertKind, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], group: int
) -> ExpertWeights:
    """Codes and scales in place of the matrices of `weights`."""
    return ExpertWeights(up[0], down[0], kind, up[1], down[1], weights.gate_up_bias, weights.down_bias, group)


def _in_mxfp4(matrices: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = zip(*(pack_mxfp4(*quantize_mxfp4(each)) for each in matrices), strict=True)
    return torch.stack(data), torch.stack(scales)


def _in_nvfp4(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = [quantize_nvfp4(each) for each in matrices]
    data, scales = zip(*(pack_nvfp4(codes, scale) for codes, scale, _ in made), strict=True)
    factors = torch.stack([factor for *_, factor in made])[:, None].expand(matrices.shape[:2])
    return torch.stack(data), torch.stack(scales), factors.contiguous()


def _in_integers(matrices: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    made = [quantize_integers(each, bits, group or each.shape[1]) for each in matrices]
    scales = [torch.stack([scale, zero.float()], -1) for _, scale, zero in made]
    codes = [pack_int4(codes) if bits == 4 else codes for codes, _, _ in made]
    return torch.stack(codes), torch.stack(scales).to(matrices.dtype)


def _scale(scale: Tensor | None, kind: ExpertKind) -> Tensor:
    assert scale is not None, "a weight in FP8 has a scale"
    return scale[:, 0] if kind == "fp8_channel" else scale
