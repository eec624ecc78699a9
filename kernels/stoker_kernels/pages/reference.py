"""Copies of whole pages in plain PyTorch: oracle and CPU backend.

Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from torch import Tensor


def copy_pages(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole pages; `pages.copy_pages`."""
    target[pairs[:, 1].long()] = source[pairs[:, 0].long()]
