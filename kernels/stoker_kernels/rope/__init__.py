"""Rotary embedding, with the optional norm of q and k before it and the write of k and v into their pages.

Must never know: how angles are scaled for long contexts (the model's table says them). A new implementation: beside
`triton_rope.py`, registered in `op.py`.
"""

from stoker_kernels.rope.op import qk_norm_rope_kv_write

__all__ = ["qk_norm_rope_kv_write"]
