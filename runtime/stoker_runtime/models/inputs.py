"""What the model gets for one step, and nothing else.

Invariants: every tensor lies on the model's device; rows are ordered as in `Batch` (decodes, then prefill chunks);
the shapes below hold for padded steps too, where a padded token has slot -1 and a padded row has KV length 0.
Knows nothing of requests, of sampling, or of how the tensors were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from stoker_kernels.attention import AttentionMeta
from stoker_kernels.gemm import adapted_linear, adapted_silu_mul, linear
from stoker_kernels.image_attention import ImageSpans
from stoker_kernels.lora import LoraPlan, LoraStep, LoraTarget, add_lora_embedding
from stoker_kernels.quant import AnyWeight, Quantized
from stoker_kernels.recurrence import DraftRows


@dataclass(frozen=True, slots=True)
class AdapterInputs:
    """What adapters add in one step: their matrices by the parameter that they change, and whose tokens are whose.

    `tokens` plans all tokens of the step, `rows` those that go beyond the last layer's attention; `scratch` is fp32.
    `planned`: between plan and layers other work was launched, so that launches may read the plan ahead of their turn.
    """

    targets: Mapping[str, LoraTarget]
    tokens: LoraPlan
    rows: LoraPlan
    scratch: Tensor
    planned: bool = False

    @property
    def beyond_attention(self) -> AdapterInputs:
        """The same for what is left of the tokens after the last layer's attention."""
        return replace(self, tokens=self.rows)

    @property
    def step(self) -> LoraStep:
        """What the linears of all tokens share."""
        return LoraStep(self.tokens, self.scratch, self.planned)

    def linear(
        self, x: Tensor | Quantized, weight: AnyWeight, bias: Tensor | None, parameter: str, out: Tensor | None = None
    ) -> Tensor:
        """`linear` of the operands, with what the adapters change in `parameter`."""
        if (target := self.targets.get(parameter)) is None:
            return linear(x, weight, bias=bias, out=out)
        return adapted_linear(x, weight, target, self.step, bias=bias, out=out)

    def silu_mul(self, x: Tensor, weight: AnyWeight, parameter: str) -> Tensor | None:
        """silu(gate) · up of the two stacked in `parameter`; None where no adapter may change it, or adapters have one
        matrix for both.
        """
        if (target := self.targets.get(parameter)) is None or len(target.rows) != 2:
            return None
        return adapted_silu_mul(x, weight, target, self.step)

    def add_embedding(self, y: Tensor, ids: Tensor) -> None:
        """The same for the embedding of `ids`."""
        if (target := self.targets.get("embed")) is not None:
            add_lora_embedding(y, ids, target, self.tokens, self.scratch)


@dataclass(frozen=True, slots=True)
class StateTaps:
    """Where a step leaves its residual stream before each of `layers`, side by side: `states [T, layers · H]`."""

    layers: tuple[int, ...]
    states: Tensor

    def take(self, layer: int, stream: Tensor) -> None:
        """Copy the stream `[T, H]` before `layer`, if it is wanted."""
        if layer in self.layers:
            places = self.states.unflatten(1, (len(self.layers), -1))
            for at, each in enumerate(self.layers):
                if each == layer:
                    places[:, at].copy_(stream)


@dataclass(frozen=True, slots=True)
class ShownImages:
    """What of a step's tokens shows images: `states [n, H]` are in place of the embedding at `rows [n]` int64, and
    `deeper[i] [n, H]` is added to the stream of these rows behind layer i.
    """

    rows: Tensor
    states: Tensor
    deeper: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Rotation:
    """What queries and keys are rotated by where that is not their tokens' places: the rows `positions [T]` int32 of
    the rotary table, or of the step's own `table [T, D]`.
    """

    positions: Tensor
    table: Tensor | None


@dataclass(frozen=True, slots=True)
class PagesOfLayer:
    """Where a layer's keys and values go, `slot_mapping [T]` as of `ForwardInputs`, and what its attention reads."""

    slot_mapping: Tensor
    attention: AttentionMeta


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """`T` tokens of `S` rows, flattened row after row.

    `ids`, `positions`: `[T]` int32. `slot_mapping`: `[T]` int64, page · page_size + offset where the token's
    key and value go; -1 writes nothing. `logits_rows`: indices into the `T` tokens whose hidden state is wanted,
    int64; None wants all of them (a pure decode step, where T = S). `adapters`: None where no row has one. `taps`: None
    where nothing drafts from the model's states. `pages`: of each layer, where not all have the same; else ().
    `drafts`: of a model whose layers keep a state, the rows of a step whose last tokens may be taken back; else None.
    `rotation`: None where tokens are rotated by their places. `images`: None where the step shows none. `spans`: of
    these, where their tokens see each other; else None.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionMeta
    logits_rows: Tensor | None = None
    adapters: AdapterInputs | None = None
    taps: StateTaps | None = None
    pages: tuple[PagesOfLayer, ...] = ()
    drafts: DraftRows | None = None
    rotation: Rotation | None = None
    images: ShownImages | None = None
    spans: ImageSpans | None = None

    def of_layer(self, index: int) -> ForwardInputs | PagesOfLayer:
        """What says where the pages of layer `index` are."""
        return self.pages[index] if self.pages else self
