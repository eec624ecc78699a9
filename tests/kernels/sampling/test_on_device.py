"""The sampling kernels choose the very tokens that the reference chooses."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels import sampling
from stoker_kernels.sampling import (
    SamplingState,
    SlotSampling,
    pack_slot_sampling,
    reference,
    reference_parts,
    reference_typical,
    typical,
)
from stoker_kernels.sampling.parts import PEAK_DIGITS
from stoker_kernels.sampling.state import CANDIDATES, TILE

SLOTS = 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _updates(vocab: int) -> list[SlotSampling]:
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.25}
    history = {"prompt": [0, 1, 2], "output": [2, 5, 5, vocab - 1]}
    bias = {"bias": [(0, 3.5), (vocab // 2, -2.0), (vocab - 1, 1.0)], "suppressed": [1, 3, 3], "suppress_until": 50}
    return [
        SlotSampling(0, temperature=0.7, seed=5),
        SlotSampling(1, temperature=1.0, seed=-3, top_k=20),
        SlotSampling(2, temperature=1.3, seed=2**63 + 5, top_p=0.9),
        SlotSampling(3, temperature=0.8, seed=1, top_k=50, top_p=0.8, min_p=0.01, **penalties, **history, **bias),
        SlotSampling(5, temperature=0.0, **penalties, **history),
        SlotSampling(6, temperature=0.0, **bias),
        SlotSampling(7, temperature=1.0, seed=9, min_p=0.2),
    ]


def _states(updates: list[SlotSampling], vocab: int, device: torch.device) -> tuple[SamplingState, SamplingState]:
    """The same state twice: for the kernels on `device`, and for the reference on the CPU."""
    packed = torch.from_numpy(pack_slot_sampling(updates, vocab))
    mine = SamplingState.allocate(SLOTS, vocab, device)
    theirs = SamplingState.allocate(SLOTS, vocab, torch.device("cpu"))
    sampling.apply_slot_sampling(packed.to(device), len(updates), mine)
    reference.apply(packed, len(updates), theirs)
    for name in ("params", "bias_ids", "bias_values", "bias_until", "counts"):
        assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)), name
    return mine, theirs


def _compare(
    logits: torch.Tensor, updates: list[SlotSampling], device: torch.device, *, steps: int, masked: bool = False
) -> None:
    vocab = logits.shape[1]
    mine, theirs = _states(updates, vocab, device)
    slots = torch.tensor([-1, *(update.slot for update in updates)], dtype=torch.int32)
    adjust = masked or any(update.adjusted for update in updates)
    generator = torch.Generator().manual_seed(vocab)
    mask = None
    if masked:
        mask = torch.randint(-(2**31), 2**31, (len(slots), -(-vocab // 32)), generator=generator).to(torch.int32)
    for _ in range(steps):
        positions = torch.randint(100, (len(slots),), generator=generator, dtype=torch.int32)
        expected = reference.sample(logits, theirs, slots, positions, adjust=adjust, bitmask=mask)
        got = sampling.sample(
            logits.to(device), mine, slots.to(device), positions.to(device), adjust=adjust,
            bitmask=None if mask is None else mask.to(device),
        )  # fmt: skip
        assert got.tolist() == expected.tolist()
        assert got[0] == -1
    assert torch.equal(mine.counts.cpu(), theirs.counts)


def _logits(rows: int, vocab: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)


@pytest.mark.parametrize(("spread", "masked"), [(0.0, False), (1.0, False), (1.0, True), (8.0, True)])
def test_every_feature_matches(spread: float, masked: bool, device: torch.device) -> None:
    updates = _updates(77)
    _compare(_logits(len(updates) + 1, 77, spread, torch.float32), updates, device, steps=1, masked=masked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tiles_match(dtype: torch.dtype, device: torch.device) -> None:
    updates = _updates(2 * TILE + 55)
    _compare(_logits(len(updates) + 1, 2 * TILE + 55, 2.0, dtype), updates, device, steps=1)


def test_a_nucleus_larger_than_the_candidates_matches(device: torch.device) -> None:
    vocab = CANDIDATES + 2 * TILE
    updates = [
        SlotSampling(0, temperature=1.5, seed=1, top_p=0.98),
        SlotSampling(1, temperature=1.0, seed=2, top_k=CANDIDATES + 1000),
        SlotSampling(2, temperature=1.0, seed=3, top_k=CANDIDATES + 1000, top_p=0.1),
    ]
    _compare(_logits(len(updates) + 1, vocab, 0.5, torch.float32), updates, device, steps=1)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # by NumPy, in the interpreter
def test_strange_logits_match(device: torch.device) -> None:
    logits = _logits(5, 300, 1.0, torch.float32)
    logits[1] = -torch.inf
    logits[2, 10:290] = float("nan")
    logits[3, 17] = torch.inf
    logits[4, ::2] = -1e30
    updates = [
        SlotSampling(slot, temperature=0.9, seed=slot, top_k=top_k, top_p=0.95)
        for slot, top_k in enumerate((5, 200, 0, 280))
    ]
    _compare(logits, updates, device, steps=2)


def _compare_typical(logits: torch.Tensor, device: torch.device) -> None:
    rows, vocab = logits.shape
    asked = [(0.0, 0.5), (1.0, 1.0), (0.7, 0.2), (1.0, 0.6), (1.5, 0.95), (1.0, 0.9)]
    updates = [SlotSampling(slot, temperature=t, typical_p=p, seed=slot) for slot, (t, p) in enumerate(asked)]
    updates[5] = SlotSampling(5, temperature=1.0, typical_p=0.9, bias=[(0, 4.0), (vocab - 1, -3.0)])
    mine, theirs = _states(updates, vocab, device)
    slots = torch.tensor([-1, *range(len(asked))], dtype=torch.int32)
    positions = torch.zeros_like(slots)
    generator = torch.Generator().manual_seed(vocab)
    mask = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32)
    mask[4] = torch.randint(-(2**31), 2**31, mask[4].shape, generator=generator).to(torch.int32)
    got, expected = mask.clone().to(device), mask.clone()
    typical.typical_mask(logits.to(device), mine, slots.to(device), positions.to(device), got)
    reference_typical.typical_mask(logits, theirs, slots, positions, expected)
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(expected[:3], mask[:3]), "padding, greedy and plain rows"
    assert (expected[3:] != mask[3:]).any(dim=1).all()


@pytest.mark.parametrize("vocab", [90, TILE + 55])
def test_typical_sets_match(vocab: int, device: torch.device) -> None:
    _compare_typical(_logits(7, vocab, 2.0, torch.float32), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_typical_sets_of_a_real_vocabulary_match(dtype: torch.dtype, device: torch.device) -> None:
    _compare_typical(_logits(7, 152064, 3.0, dtype), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, 1000, TILE + 1])
def test_argmax_matches(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = _logits(4, vocab, 1.0, dtype)
    logits[1] = 0.5
    logits[2, vocab // 2 :] = logits[2].max()
    logits[3, 0] = float("nan")
    assert sampling.argmax(logits.to(device)).tolist() == reference.argmax(logits).tolist()
    out = torch.full((4,), -7, dtype=torch.int32, device=device)
    assert sampling.argmax(logits.to(device), out=out) is out
    assert out[1] == 0
    assert out[2] == vocab // 2 or logits[2, : vocab // 2].max() == logits[2].max()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # by NumPy, in the interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "parts"), [(5, 2), (1003, 3), (2 * TILE + 7, 2), (4021, 7)])
def test_the_peaks_of_parts_match(vocab: int, parts: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each part's peaks are the reference's, and the best of all of them the argmax of the whole."""
    logits = _logits(7, vocab, 2.0, dtype)
    logits[0] = logits[0].round()  # equals
    logits[1] = -0.0
    logits[1, vocab // 2] = 0.0
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, [vocab // 2, vocab - 1]] = torch.inf
    logits[5] -= 300.0
    widths = [vocab // parts + (part < vocab % parts) for part in range(parts)]
    total, first = torch.zeros(7, parts * PEAK_DIGITS), 0
    for part, own in enumerate(logits.split(widths, dim=1)):
        mine = sampling.part_peaks(own.contiguous().to(device), first, part, parts).cpu()
        assert torch.equal(mine, reference_parts.part_peaks(own.contiguous(), first, part, parts))
        total, first = total + mine, first + widths[part]
    summed = total.bfloat16()
    tokens = reference.argmax(logits).tolist()
    assert sampling.best_peak(summed.to(device)).tolist() == tokens
    assert reference_parts.best_peak(summed).tolist() == tokens
    assert tokens[1:4] == [0, 0, 0]
    assert tokens[4] == vocab // 2


@pytest.mark.parametrize(("vocab", "top"), [(30, 0), (30, 20), (TILE + 9, 5)])
def test_logprobs_match(vocab: int, top: int, device: torch.device) -> None:
    logits = _logits(3, vocab, 3.0, torch.float32)
    tokens = torch.tensor([vocab - 1, -1, 4], dtype=torch.int32)
    got = sampling.token_logprobs(logits.to(device), tokens.to(device), top).cpu()
    expected = reference.token_logprobs(logits, tokens, top)
    assert got[1].isnan().all()
    assert torch.equal(got[::2, 1 : 2 + top], expected[::2, 1 : 2 + top]), "rank and ids"
    torch.testing.assert_close(got[::2], expected[::2], rtol=1e-5, atol=1e-5)


def test_equal_logits_are_listed_by_id(device: torch.device) -> None:
    logits = torch.zeros(1, TILE + 50)
    logits[0, [7, 3, TILE + 5]] = 2.0
    tokens = torch.tensor([TILE + 5], dtype=torch.int32, device=device)
    packed = sampling.token_logprobs(logits.to(device), tokens, 5)
    assert packed[0, 1] == 1.0
    assert packed[0, 2:7].tolist() == [3.0, 7.0, float(TILE + 5), 0.0, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
def test_real_vocabulary_matches(spread: float, dtype: torch.dtype, device: torch.device) -> None:
    updates = _updates(152064)
    _compare(_logits(len(updates) + 1, 152064, spread, dtype), updates, device, steps=6)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    rows, vocab = 300, 32000
    updates = [SlotSampling(slot, temperature=1.0, seed=slot, top_k=40, top_p=0.9) for slot in range(rows)]
    state = SamplingState.allocate(rows, vocab, device)
    sampling.apply_slot_sampling(torch.from_numpy(pack_slot_sampling(updates, vocab)).to(device), rows, state)
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    together = sampling.sample(logits, state, slots, slots, adjust=False)
    order = torch.randperm(rows, device=device)
    mixed = sampling.sample(logits[order], state, slots[order], slots[order], adjust=False)
    assert torch.equal(mixed, together[order])
    for row in (0, 17, rows - 1):
        alone = sampling.sample(logits[row : row + 1], state, slots[row : row + 1], slots[row : row + 1], adjust=False)
        assert alone.item() == together[row].item()
