"""What heads attend in pages: by one kernel for all tokens, by another for a prefix that a step's rows share, and once
more for the tokens of images that see each other.

Invariants: keys and values of the step are in their pages.
Knows nothing of projections.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker_kernels.attention import BlockPattern, paged_attention, shared_prefix_attention
from stoker_kernels.image_attention import image_attention
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rare:
    """What few layers have: `sinks` and `slopes` of query heads, blocks of keys that are seen alone."""

    sinks: Tensor | None
    slopes: Tensor | None
    pattern: BlockPattern | None


def attend_pages(
    spec: ModelSpec,
    index: int,
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: ForwardInputs,
    rare: Rare,
    scales: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """`query [T, Hq, D]` of layer `index` over its keys and values, `scales` of an e4m3 cache: `[T, Hq, D]`."""
    pages, (k_scale, v_scale) = inputs.of_layer(index), scales
    if pages.attention.shared is not None:
        return shared_prefix_attention(
            query, *cache, pages.attention, scale=spec.attention_scale, k_scale=k_scale, v_scale=v_scale
        )
    output = paged_attention(
        query,
        *cache,
        pages.attention,
        scale=spec.attention_scale,
        window=spec.windows[index],
        softcap=spec.attention_softcap,
        sinks=rare.sinks,
        slopes=rare.slopes,
        pattern=rare.pattern,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if inputs.spans is None:
        return output
    return image_attention(
        query,
        *cache,
        pages.attention.page_table,
        inputs.spans,
        scale=spec.attention_scale,
        window=spec.windows[index],
        softcap=spec.attention_softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        out=output,
    )
