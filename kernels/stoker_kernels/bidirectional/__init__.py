"""Attention of encoders: whole texts, no cache, every token sees all of its text.

Must never know: pages, models. A new implementation: beside `triton_bidirectional.py`, registered in `op.py`.
"""

from stoker_kernels.bidirectional.op import bidirectional_attention

__all__ = ["bidirectional_attention"]
