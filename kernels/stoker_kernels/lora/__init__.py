"""Low-rank additions to linear layers, of many adapters in one step (LoRA, Hu et al. 2021).

`op.py` holds the public functions, `types.py` what they take, `triton_plan.py` and `triton_lora.py` the kernels,
`reference.py` the oracle. Must never know: adapters' names and files, requests, and which layer a target belongs to.
"""

from stoker_kernels.lora.op import (
    add_lora_embedding,
    expand_lora,
    gather_adapters,
    group_tokens,
    scratch_elements,
    shrink_lora,
)
from stoker_kernels.lora.types import LoraPlan, LoraTarget, plan_tile, plan_tiles

__all__ = [
    "LoraPlan",
    "LoraTarget",
    "add_lora_embedding",
    "expand_lora",
    "gather_adapters",
    "group_tokens",
    "plan_tile",
    "plan_tiles",
    "scratch_elements",
    "shrink_lora",
]
