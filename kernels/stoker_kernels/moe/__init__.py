"""Mixtures of experts: choosing each token's experts (`route`), running them (`experts`), or both (`mixture`).

`triton_route.py` chooses and sorts, for up to 16 tokens `hopper/` in one launch; `triton_keep.py` leaves one rank's;
`fused.py` has the Hopper kernels choose by themselves for the fewest tokens. `choose.py` has the fewest tokens
multiplied by `hopper/sm90_few.py`, many by `hopper/sm90_grouped.py`, four bits as bf16, all else by
`triton_experts.py`, with `triton_fp4.py`, `triton_int4.py` and `triton_int8.py` what `layouts/` lays out; `tiles.py`
holds sizes by rule, `variants.py` what is compiled ahead, `reference.py` is the oracle, `bench.py` checks and times.
Where batch invariance is demanded `fixed.py` runs these kernels in one way, and `rows.py` is the CPU's.
Must never know: layers, models, checkpoints. A new way to choose: a field of `Routing` (`types.py`), in both routers,
and in `csrc/few_choice.cuh`, or refused by `sm90_few.py`.
"""

from stoker_kernels.moe.choose import scratch_bytes
from stoker_kernels.moe.layouts.int4 import pack_int4
from stoker_kernels.moe.layouts.mxfp4 import pack_mxfp4, quantize_mxfp4, scale_bytes
from stoker_kernels.moe.layouts.nvfp4 import pack_nvfp4, quantize_nvfp4
from stoker_kernels.moe.op import experts, keep_experts, mixture, route
from stoker_kernels.moe.types import (
    ExpertActivation,
    ExpertKind,
    ExpertWeights,
    Plan,
    Routes,
    Routing,
    Scoring,
    expert_scale_shapes,
    quantize_experts,
)

__all__ = [
    "ExpertActivation",
    "ExpertKind",
    "ExpertWeights",
    "Plan",
    "Routes",
    "Routing",
    "Scoring",
    "expert_scale_shapes",
    "experts",
    "keep_experts",
    "mixture",
    "pack_int4",
    "pack_mxfp4",
    "pack_nvfp4",
    "quantize_experts",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "route",
    "scale_bytes",
    "scratch_bytes",
]
