"""Decode attention of rows that begin with the same pages: those are read once for all rows, and not once for each.

`op.py` holds the public functions, `space.py` what a step keeps in memory, `reference.py` the oracle and the way on a
CPU. On a GPU `triton_shared.py` has the kernels and `launch.py` launches them, `attention` attends what a row has of
its own and merges both. `config.py` holds tiles, parts and the rule of when it pays, `variants.py` what is compiled
ahead, `bench.py` checks and times.
Must never know: models, requests, who shares pages and why. What a step tells is `attention`'s AttentionMeta.
"""

from stoker_kernels.shared_prefix.config import prefix_pays, prefix_refusal
from stoker_kernels.shared_prefix.op import cut_prefix, shared_prefix_attention
from stoker_kernels.shared_prefix.space import PrefixSizes, PrefixSpace, prefix_space

__all__ = [
    "PrefixSizes",
    "PrefixSpace",
    "cut_prefix",
    "prefix_pays",
    "prefix_refusal",
    "prefix_space",
    "shared_prefix_attention",
]
