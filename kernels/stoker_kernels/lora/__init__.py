"""Low-rank additions to linear layers, of many adapters in one step (LoRA, Hu et al. 2021).

`op.py` holds the public functions, `types.py` what they take, `triton_plan.py` and `triton_lora.py` the kernels,
`cluster_shrink.py` the first half of a product by clusters of CTAs, which `gemm` adds the second one to, and
`mma_expand.py` the second one by itself. `reference.py` is the oracle. Must never know: adapters' names and files,
requests, and which layer a target belongs to.
"""

from stoker_kernels.lora.cluster_shrink import row_ranks, shrink_refusal, shrink_rows, words_of
from stoker_kernels.lora.op import (
    add_lora_embedding,
    expand_lora,
    expand_silu_mul,
    gather_adapters,
    group_tokens,
    most_scratch_elements,
    scratch_elements,
    shrink_lora,
)
from stoker_kernels.lora.types import TILE, WORDS, LoraPlan, LoraStep, LoraTarget, plan_tiles

__all__ = [
    "TILE",
    "WORDS",
    "LoraPlan",
    "LoraStep",
    "LoraTarget",
    "add_lora_embedding",
    "expand_lora",
    "expand_silu_mul",
    "gather_adapters",
    "group_tokens",
    "most_scratch_elements",
    "plan_tiles",
    "row_ranks",
    "scratch_elements",
    "shrink_lora",
    "shrink_refusal",
    "shrink_rows",
    "words_of",
]
