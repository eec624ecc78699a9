"""Attention of encoders: whole texts, no cache, every token sees all of its text.

Must never know: pages, models.
"""

from stoker_kernels.bidirectional.op import bidirectional_attention

__all__ = ["bidirectional_attention"]
