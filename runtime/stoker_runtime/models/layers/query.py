"""What queries are multiplied with after they rotated: by how far their position lies, and by the weights of norms that
models have behind the rotation.

Invariants: no branch on values and no wait for the device; keys are cached without such weights, which are the queries'
own: a product of both is all that attention sees, and a rotation keeps the length that a norm divides by.
Knows nothing of pages and of how attention is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_runtime.models.decoder_weights import LayerWeights
from stoker_runtime.models.rope import query_growth
from stoker_runtime.models.spec import ModelSpec, QkNorm


class Queries:
    """How the layers of one model norm queries and keys before they rotate, and what queries get afterwards."""

    def __init__(self, spec: ModelSpec, longest: int, device: torch.device, dtype: torch.dtype) -> None:
        self._growth = query_growth(spec.rope, longest, device)
        rotated = spec.qk_norm is QkNorm.ROTATED
        self._ones = torch.ones(spec.head_dim, dtype=dtype, device=device) if rotated else None

    def norms(self, layer: LayerWeights) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the norms before the rotation, of queries and of keys."""
        return (layer.q_norm, layer.k_norm) if self._ones is None else (self._ones, self._ones)

    def finish(self, query: Tensor, positions: Tensor, layer: LayerWeights) -> None:
        """Multiply rotated queries `[T, Hq, D]` at `positions [T]`, in place."""
        if self._ones is not None and layer.q_norm is not None and layer.k_norm is not None:
            query.mul_(layer.q_norm.float() * layer.k_norm.float())
        if self._growth is not None:
            query.mul_(self._growth.index_select(0, positions))
