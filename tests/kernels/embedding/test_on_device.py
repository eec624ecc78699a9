"""The embedding kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import embedding
from stoker_kernels.embedding import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [8, 1100])
def test_rows_are_copied(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    table = torch.randn(17, hidden).to(device, dtype)
    ids = torch.tensor([0, 16, 3, 3], dtype=torch.int32, device=device)
    out = torch.full((4, hidden), float("nan"), dtype=dtype, device=device)
    assert torch.equal(embedding.embed(ids, table, out=out), reference.embed(ids, table))


def test_an_id_outside_the_table_reads_nothing(device: torch.device) -> None:
    table = torch.ones(4, 8, device=device)
    ids = torch.tensor([4, -1, 1], dtype=torch.int32, device=device)
    assert embedding.embed(ids, table).sum(1).tolist() == [0.0, 0.0, 8.0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 7.25])
def test_rows_are_scaled_and_placed(scale: float, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    table, placed = torch.randn(17, 1100).to(device, dtype), torch.randn(9, 1100).to(device, dtype)
    ids = torch.tensor([0, 16, 3, 3], dtype=torch.int32, device=device)
    positions = torch.tensor([8, 0, 3, 4], dtype=torch.int32, device=device)
    for more in ({}, {"positions": positions, "position_table": placed}):
        expected = reference.embed(ids, table, scale=scale, **more)
        torch.testing.assert_close(
            embedding.embed(ids, table, scale=scale, **more), expected, rtol=tolerance, atol=tolerance
        )
