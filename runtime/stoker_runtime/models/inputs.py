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
from stoker_kernels.lora import LoraPlan, LoraTarget, add_lora_embedding, expand_lora, shrink_lora
from stoker_kernels.quant import Quantized


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

    def shrink(self, x: Tensor | Quantized, parameter: str) -> None:
        """Begin what the adapters change in the product of `parameter` with `x`; `expand` must follow."""
        if (target := self.targets.get(parameter)) is not None:
            shrink_lora(x, target, self.tokens, self.scratch, planned=self.planned)

    def expand(self, y: Tensor, parameter: str) -> None:
        """Add what `shrink` began to the product `y`, in place."""
        if (target := self.targets.get(parameter)) is not None:
            expand_lora(y, target, self.tokens, self.scratch, planned=self.planned)

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
class ForwardInputs:
    """`T` tokens of `S` rows, flattened row after row.

    `ids`, `positions`: `[T]` int32. `slot_mapping`: `[T]` int64, page · page_size + offset where the token's
    key and value go; -1 writes nothing. `logits_rows`: indices into the `T` tokens whose hidden state is wanted,
    int64; None wants all of them (a pure decode step, where T = S). `adapters`: None where no row has one. `taps`: None
    where nothing drafts from the model's states.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionMeta
    logits_rows: Tensor | None = None
    adapters: AdapterInputs | None = None
    taps: StateTaps | None = None
