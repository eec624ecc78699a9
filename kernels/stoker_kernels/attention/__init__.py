"""Causal attention over paged keys and values: decode, chunks and mixed steps in one op.

`op.py` is the public function, `inputs.py` what a launch is given, `choose.py` picks among the Triton kernels
(`triton_*`; launched by `triton_launch.py`) and the Hopper ones (`sm90_*`, csrc/), `config.py` holds tile sizes and
split rules, `variants.py` what is compiled ahead, `reference.py` the oracle. Where a token's bits may not depend on the
batch: `fixed.py` (`triton_fixed.py`), and on a CPU `attend_rows` of `cpu_attention.py`. What all rows of a step begin
with is attended once by `shared_prefix/`.
Must never know: models, requests, schedulers. A new kernel: its host side here, a rule in `config.py`, a branch in
`choose.py`, its types and constants in `variants.py`.
"""

from stoker_kernels.attention.cpu_attention import rows_attended, rows_support
from stoker_kernels.attention.inputs import BlockPattern
from stoker_kernels.attention.meta import (
    AttentionMeta,
    AttentionWorkspace,
    attention_workspace,
    attention_workspace_bytes,
    plan_bytes,
    share_workspace,
)
from stoker_kernels.attention.op import attention_kernels, paged_attention, plan_attention, split_decodes
from stoker_kernels.attention.shared_prefix.config import prefix_pays, prefix_refusal
from stoker_kernels.attention.shared_prefix.op import cut_prefix, shared_prefix_attention
from stoker_kernels.attention.shared_prefix.space import PrefixSizes, PrefixSpace, prefix_space

__all__ = [
    "AttentionMeta",
    "AttentionWorkspace",
    "BlockPattern",
    "PrefixSizes",
    "PrefixSpace",
    "attention_kernels",
    "attention_workspace",
    "attention_workspace_bytes",
    "cut_prefix",
    "paged_attention",
    "plan_attention",
    "plan_bytes",
    "prefix_pays",
    "prefix_refusal",
    "prefix_space",
    "rows_attended",
    "rows_support",
    "share_workspace",
    "shared_prefix_attention",
    "split_decodes",
]
