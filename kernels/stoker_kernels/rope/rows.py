"""QK norm, RoPE and KV write on a CPU, one token at a time, so that a token does not depend on what is beside it.

Invariants: those of `launch/each_row.py`; arithmetic and results as of `cpu_rope.py`.
Knows nothing of dispatch.
"""

from __future__ import annotations

from stoker_kernels.launch.each_row import each_row
from stoker_kernels.rope import cpu_rope

qk_norm_rope_kv_write = each_row(cpu_rope.qk_norm_rope_kv_write, "qkv", "positions", "slot_mapping")
