"""The ragged expansion against its reference: random chunks, padded rows, padded tokens."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import ragged
from stoker_kernels.ragged import reference

SLOTS, PAGES = 40, 64


def _step(seed: int, page_size: int, device: torch.device) -> tuple[ragged.RaggedRows, ragged.SlotTensors, int]:
    """A random step: some decode rows (some padded), chunks of 1 to 300 tokens, padded chunks, padded tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    decodes, chunks, padded = 5, 3, 2
    lengths = [1] * decodes + draw(1, 300, chunks).tolist() + [0] * padded
    slots = torch.randperm(SLOTS, generator=generator)[: len(lengths)].to(torch.int32)
    slots[decodes - 1] = -1
    slots[decodes + chunks :] = -1
    query_start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    rows = ragged.RaggedRows(
        slots.to(device),
        query_start.to(device),
        draw(0, 500, len(lengths)).to(device),
        draw(0, 1000, int(query_start[-1]) + 37).to(device),
    )
    state = ragged.SlotTensors(
        draw(0, 1000, SLOTS).to(device),
        draw(0, PAGES * page_size, SLOTS).to(device),
        draw(0, 5000, SLOTS, PAGES).to(device),
    )
    return rows, state, decodes


def _outputs(rows: ragged.RaggedRows, device: torch.device) -> ragged.RaggedOutputs:
    def poisoned(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size,), -99, dtype=dtype, device=device)

    tokens, count = rows.ids.shape[0], rows.row_slots.shape[0]
    return ragged.RaggedOutputs(
        poisoned(tokens, torch.int32),
        poisoned(tokens, torch.int32),
        poisoned(tokens, torch.int64),
        poisoned(count, torch.int32),
        poisoned(count, torch.int64),
        poisoned(count, torch.int32),
    )


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prepare_ragged_matches(seed: int, page_size: int, device: torch.device) -> None:
    results = []
    for function in (ragged.prepare_ragged, reference.prepare_ragged):
        rows, state, decodes = _step(seed, page_size, device)
        out = _outputs(rows, device)
        function(rows, state, page_size, decodes, out)
        results.append((out, state))
    (got, got_state), (expected, expected_state) = results
    for name in ("ids", "positions", "slot_mapping", "seq_lens", "logits_rows", "advance"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert torch.equal(got_state.position, expected_state.position)
