"""How near two results must be that differ by rounding alone."""

from __future__ import annotations

import torch


def close(got: torch.Tensor, expected: torch.Tensor, parts: float = 1.0) -> None:
    """Equal to within the rounding of their type."""
    step = torch.finfo(expected.dtype).eps
    error = (got.float() - expected.float()).abs().max()
    assert error <= parts * 4 * step * max(1.0, float(expected.float().abs().max())), float(error)
