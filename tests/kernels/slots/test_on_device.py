"""The slot-state kernels against their reference, on random states."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import slots
from stoker_kernels.slots import reference

SLOTS, PAGES, ROWS = 300, 7, 290


def _state(device: torch.device, page_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(page_size)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32).to(device)

    rows = torch.randperm(SLOTS, generator=generator)[:ROWS].to(torch.int32)
    rows[torch.rand(ROWS, generator=generator) < 0.3] = -1
    return {
        "row_slots": rows.to(device),
        "last_token": draw(1000, SLOTS),
        "position": draw(PAGES * page_size, SLOTS),
        "page_table": draw(5000, SLOTS, PAGES),
        "sampled": draw(1000, ROWS),
        "advance": draw(3, ROWS),
    }


@pytest.mark.parametrize("page_size", [16, 64])
def test_prepare_decode_matches(page_size: int, device: torch.device) -> None:
    state = _state(device, page_size)
    outputs = []
    for module in (slots, reference):
        out = {
            name: torch.full((ROWS,), -99, dtype=torch.int64 if "mapping" in name else torch.int32).to(device)
            for name in ("ids_out", "positions_out", "slot_mapping_out", "seq_lens_out")
        }
        names = ("row_slots", "last_token", "position", "page_table")
        module.prepare_decode(*(state[name] for name in names), page_size, **out)
        outputs.append(out)
    for name in outputs[0]:
        assert torch.equal(outputs[0][name], outputs[1][name]), name


def test_commit_tokens_matches(device: torch.device) -> None:
    results = []
    for module in (slots, reference):
        state = _state(device, 16)
        ring = torch.full((ROWS,), -99, dtype=torch.int32, device=device)
        names = ("row_slots", "sampled", "position", "last_token")
        module.commit_tokens(*(state[name] for name in names), ring, state["advance"])
        results.append((state["position"], state["last_token"], ring))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_apply_updates_matches(device: torch.device) -> None:
    packed = slots.pack_updates([(5, 0, [9, 8, 7]), (299, 6, [1]), (5, 1, [77])], [(5, 40), (7, 3)], [(5, 11), (5, 12)])
    upload = torch.cat([torch.from_numpy(packed), torch.tensor([[-1, 0, 5]], dtype=torch.int32)]).to(device)
    results = []
    for module in (slots, reference):
        state = _state(device, 16)
        module.apply_updates(upload, state["page_table"], state["position"], state["last_token"])
        results.append((state["page_table"], state["position"], state["last_token"]))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
    table, position, last_token = results[0]
    assert table[5, :3].tolist() == [9, 77, 7]
    assert (position[5].item(), last_token[5].item()) == (40, 12)


def test_an_empty_upload_changes_nothing(device: torch.device) -> None:
    state = _state(device, 16)
    before = state["page_table"].clone()
    empty = torch.from_numpy(slots.pack_updates()).to(device)
    slots.apply_updates(empty, state["page_table"], state["position"], state["last_token"])
    assert torch.equal(state["page_table"], before)
