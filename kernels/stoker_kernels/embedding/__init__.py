"""Rows of the embedding table by token id.

Must never know: how the table is shared or quantized. A new implementation: beside `triton_embedding.py`, registered
in `op.py`.
"""

from stoker_kernels.embedding.op import embed

__all__ = ["embed"]
