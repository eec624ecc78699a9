"""The reference of the embedding against torch's indexing."""

from __future__ import annotations

import torch

from stoker_kernels import embedding


def test_embed_copies_rows() -> None:
    table = torch.randn(7, 4)
    assert torch.equal(embedding.embed(torch.tensor([6, 0], dtype=torch.int32), table), table[[6, 0]])
