"""Rows of the embedding table by token id."""

from stoker_kernels.embedding.op import embed

__all__ = ["embed"]
