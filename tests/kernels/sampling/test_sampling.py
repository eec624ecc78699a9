"""Sampling against its definition: exact sets, frequencies by chi-square, penalties, bias, masks, log-probabilities."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from stoker_kernels.launch import cc
from stoker_kernels.sampling import (
    MAX_BIAS,
    SamplingState,
    SlotSampling,
    apply_slot_sampling,
    argmax,
    best_peak,
    compiled_argmax,
    pack_slot_sampling,
    part_peaks,
    reference,
    sample,
    token_logprobs,
    typical_mask,
)
from stoker_kernels.sampling.parts import PEAK_DIGITS

CPU = torch.device("cpu")
VOCAB = 24


def _state(*updates: SlotSampling, vocab: int = VOCAB) -> SamplingState:
    state = SamplingState.allocate(max(8, len(updates)), vocab, CPU)
    apply_slot_sampling(torch.from_numpy(pack_slot_sampling(updates, vocab)), len(updates), state)
    return state


def _draw(logits: torch.Tensor, state: SamplingState, slots: list[int], **options: Any) -> list[int]:
    rows = torch.tensor(slots, dtype=torch.int32)
    return sample(logits, state, rows, torch.zeros_like(rows), **options).tolist()


def _definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities in float64, filters in their order, by sorting."""
    p = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    p = np.where(p >= min_p * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p = p / p.sum()
    kept = int((np.cumsum(p[order]) < top_p * (1 - 1e-12)).sum()) + 1
    p[order[kept:]] = 0
    return p / p.sum()


CASES = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.3, 0, 1.0, 0.0),
    "hot": (2.0, 0, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_p": (1.0, 0, 0.8, 0.0),
    "min_p": (1.2, 0, 1.0, 0.1),
    "all": (0.9, 12, 0.9, 0.02),
    "one": (1.0, 1, 1.0, 0.0),
    "least nucleus": (1.0, 0, 1e-6, 0.0),
}


@pytest.mark.parametrize(("case", "by"), [*((case, "position") for case in CASES), ("plain", "seed"), ("all", "seed")])
def test_frequencies_follow_the_definition(case: str, by: str) -> None:
    temperature, top_k, top_p, min_p = CASES[case]
    logits = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    draws = 2000
    updates = [
        SlotSampling(slot, temperature, top_k, top_p, min_p, seed=slot * 7919 if by == "seed" else 42)
        for slot in range(draws if by == "seed" else 1)
    ]
    state = _state(*updates)
    if by == "position":
        state.params.resize_(draws, state.params.shape[1])
        state.params[:] = state.params[0].clone()
        rows, positions = torch.zeros(draws, dtype=torch.int32), torch.arange(draws, dtype=torch.int32)
    else:
        rows, positions = torch.arange(draws, dtype=torch.int32), torch.full((draws,), 11, dtype=torch.int32)
    tokens = sample(logits.expand(draws, VOCAB), state, rows, positions, adjust=False)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    p = _definition(logits, temperature, top_k, top_p, min_p)
    assert (counts[p == 0] == 0).all(), "a token that the filters drop was drawn"
    likely = p * draws >= 5
    expected = np.append(p[likely], p[~likely].sum()) * draws
    observed = np.append(counts[likely], counts[~likely].sum())
    used = expected > 0
    chi_square = float((np.square(observed - expected)[used] / expected[used]).sum())
    freedom = max(1, int(used.sum()) - 1)
    # Wilson and Hilferty's quantile of chi-square at 4 standard deviations.
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


def _typical_definition(logits: torch.Tensor, temperature: float, typical_p: float) -> set[int]:
    """The typical set in float64, by sorting."""
    p = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    entropy = -(p * np.log2(p)).sum()
    order = np.argsort(np.abs(-np.log2(p) - entropy), kind="stable")
    kept = int((np.cumsum(p[order]) < typical_p).sum()) + 1
    return set(order[:kept].tolist())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_the_typical_set_follows_the_definition(typical_p: float, temperature: float) -> None:
    rows, vocab = 6, 77
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 2
    state = _state(*(SlotSampling(at, temperature=temperature, typical_p=typical_p) for at in range(rows)), vocab=vocab)
    mask = torch.full((rows, 3), -1, dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32)
    typical_mask(logits, state, slots, torch.zeros_like(slots), mask)
    for row in range(rows):
        kept = {token for token in range(vocab) if mask[row, token // 32] >> (token % 32) & 1}
        assert kept == _typical_definition(logits[row], temperature, typical_p)


def test_the_best_token_may_be_untypical_and_other_filters_see_what_is_left() -> None:
    # One token of probability 0.3 among many small ones: the entropy is nearer to the small.
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = math.log(10)
    state = _state(SlotSampling(0, temperature=1.0, typical_p=0.4), SlotSampling(1, temperature=1.0, typical_p=1.0))
    mask = torch.full((3, 1), -1, dtype=torch.int32)
    slots = torch.tensor([0, 1, -1], dtype=torch.int32)
    typical_mask(logits.repeat(3, 1), state, slots, torch.zeros_like(slots), mask)
    assert not mask[0, 0] >> 5 & 1
    assert mask[1:].tolist() == [[-1], [-1]], "who does not ask for it keeps everything"
    assert _draw(logits, state, [0], bitmask=mask[:1])[0] != 5


def test_a_mask_counts_before_the_typical_set() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    state = _state(SlotSampling(0, temperature=1.0, typical_p=0.5), vocab=40)
    allowed = [1, 2, 3, 20, 33]
    mask = torch.zeros(1, 2, dtype=torch.int32)
    for token in allowed:
        mask[0, token // 32] |= 1 << token % 32
    slots = torch.zeros(1, dtype=torch.int32)
    typical_mask(logits, state, slots, slots, mask)
    kept = {token for token in range(40) if mask[0, token // 32] >> (token % 32) & 1}
    expected = _typical_definition(logits[0, allowed], 1.0, 0.5)
    assert kept == {allowed[at] for at in expected}


def test_ties_at_the_bound_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        state = _state(SlotSampling(0, temperature=1.0, **options), vocab=6)
        rows = torch.zeros(500, dtype=torch.int32)
        state.params.resize_(500, state.params.shape[1])
        tokens = sample(logits.expand(500, 6), state, rows, torch.arange(500, dtype=torch.int32), adjust=False)
        assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_philox_gives_the_published_words() -> None:
    # Random123's known answer of philox4x32-10 for counter 0 and key 0.
    assert reference._philox(0, 0, 0) == (0x6627E8D5, 0xE169C58D)


def test_weights_are_the_exponential() -> None:
    values = torch.linspace(-30, 0, 5001)
    one = torch.ones(1)
    weights = reference._weights(values[None], 0 * one, one, 0 * one)[0]
    expected = torch.exp(values.double()) * 2**40
    assert (weights.double() - expected).abs().le(1 + expected * 3e-6).all()
    assert weights[-1] == 2**40
    assert (weights.diff() >= 0).all()


def test_the_same_seed_and_position_give_the_same_token() -> None:
    logits = torch.randn(1, 1000).expand(4, 1000)
    seeds = (9, 9, 10, -9)
    state = _state(*(SlotSampling(i, temperature=1.0, seed=seed) for i, seed in enumerate(seeds)), vocab=1000)
    tokens = _draw(logits, state, [0, 1, 2, 3], adjust=False)
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) > 1


def test_greedy_rows_mixed_with_sampled_and_padding() -> None:
    logits = torch.randn(4, VOCAB)
    state = _state(SlotSampling(1), SlotSampling(2, temperature=1e-6), SlotSampling(3, temperature=1.0))
    tokens = _draw(logits, state, [1, -1, 2, 3])
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] == -1
    assert tokens[2] == int(logits[2].argmax())


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({"repetition_penalty": 2.0}, [2.0, 2.0, 1.5, -4.0]),
        ({"frequency_penalty": 0.5}, [4.0, 3.0, 1.5, -2.0]),
        ({"presence_penalty": 0.75}, [4.0, 3.25, 2.25, -2.0]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}, [2.0, -1.0, -2.5, -4.0]),
    ],
)
def test_penalties(penalties: dict[str, float], expected: list[float]) -> None:
    """Token 0 is in the prompt, 1 in both (output twice), 2 in the output three times, 3 in the prompt."""
    update = SlotSampling(0, **penalties, prompt=[0, 1, 3, 3], output=[1, 2, 1, 2, 2])
    assert update.adjusted
    logits = torch.tensor([4.0, 4.0, 3.0, -2.0, 0.5])
    state = _state(update, vocab=5)
    rows = logits[None].clone()
    reference._adjust(rows, state, [0], [0], None)
    assert rows[0].tolist() == [*expected, 0.5]


def test_sampled_tokens_are_counted() -> None:
    state = _state(SlotSampling(0, frequency_penalty=1.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 3] = 2.5, 1.0
    assert [_draw(logits, state, [0])[0] for _ in range(5)] == [7, 7, 3, 7, 0]
    assert state.counts[0, 7] == 3
    apply_slot_sampling(torch.from_numpy(pack_slot_sampling([SlotSampling(0, presence_penalty=1.0)], VOCAB)), 1, state)
    assert not state.counts[0].any(), "a new sequence starts with its own history"


def test_bias_and_suppressed_tokens() -> None:
    update = SlotSampling(0, bias=[(5, 100.0), (6, -100.0)], suppressed=[5, 2], suppress_until=10)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 50.0
    logits[0, 6] = 60.0
    state = _state(update)
    rows = torch.zeros(1, dtype=torch.int32)
    at = [sample(logits, state, rows, torch.tensor([p], dtype=torch.int32)).item() for p in (0, 9, 10, 11)]
    assert at == [0, 0, 5, 5]
    assert not SlotSampling(0, suppressed=[5], suppress_until=0).adjusted


def test_a_bitmask_is_obeyed() -> None:
    allowed = {1, 31, 32, 60}
    mask = torch.zeros(1, 2, dtype=torch.int64)
    for token in allowed:
        mask[0, token // 32] |= 1 << (token % 32)
    mask = mask.to(torch.int32)
    state = _state(*(SlotSampling(i, temperature=2.0, seed=i) for i in range(200)), vocab=61)
    logits = torch.randn(1, 61).expand(200, 61)
    tokens = _draw(logits, state, list(range(200)), bitmask=mask.expand(200, 2))
    assert set(tokens) == allowed
    with pytest.raises(ValueError, match="adjust"):
        _draw(logits, state, list(range(200)), bitmask=mask.expand(200, 2), adjust=False)


def test_a_row_with_nothing_allowed_gets_token_zero() -> None:
    state = _state(SlotSampling(0, temperature=1.0))
    assert _draw(torch.full((1, VOCAB), -torch.inf), state, [0]) == [0]


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="9 rows"):
        _draw(torch.zeros(9, VOCAB), _state(), [0] * 9)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([SlotSampling(0), SlotSampling(0)], "once"),
        ([SlotSampling(0, bias=[(VOCAB, 1.0)])], "between 0 and 23"),
        ([SlotSampling(0, presence_penalty=1.0, prompt=[-1])], "between 0 and 23"),
        ([SlotSampling(0, bias=[(0, 1.0)] * (MAX_BIAS + 1))], "at most 512"),
    ],
)
def test_bad_updates_are_refused(updates: list[SlotSampling], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_slot_sampling(updates, VOCAB)


def test_state_takes_the_bytes_it_says() -> None:
    state = SamplingState.allocate(5, 10000, CPU)
    tensors = (getattr(state, name) for name in SamplingState.__dataclass_fields__)
    assert sum(tensor.nbytes for tensor in tensors) == SamplingState.nbytes(5, 10000)


def test_logprobs_are_log_softmax() -> None:
    logits = torch.randn(2, VOCAB).bfloat16()
    tokens = torch.tensor([3, 9], dtype=torch.int32)
    packed = token_logprobs(logits, tokens, 4)
    expected = torch.log_softmax(logits.float(), dim=-1)
    best = expected.topk(4, dim=-1)
    torch.testing.assert_close(packed[:, 0], expected[[0, 1], [3, 9]])
    assert packed[:, 1].tolist() == [1 + int((row > row[t]).sum()) for row, t in zip(expected, (3, 9), strict=True)]
    torch.testing.assert_close(packed[:, 6:], best.values)
    torch.testing.assert_close(expected.gather(1, packed[:, 2:6].long()), best.values)
    for top in (-1, 21):
        with pytest.raises(ValueError, match="between 0 and 20"):
            token_logprobs(logits, tokens, top)


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [float("nan"), -1.0, -2.0]])
    assert argmax(logits).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_best_peak_of_parts_is_the_argmax_of_the_whole(dtype: torch.dtype) -> None:
    for _ in range(60):
        rows, parts = random.randint(0, 5), random.randint(1, 9)
        widths = [random.randint(1, 90) for _ in range(parts)]
        logits = (torch.randn(rows, sum(widths)) * random.choice([0.0, 2.0, 50.0])).round().to(dtype)  # with equals
        for value in random.sample([float("nan"), float("inf"), -float("inf"), 6e4, -0.0], random.randint(0, 5)):
            logits[torch.rand(logits.shape) < random.choice([0.01, 0.3, 1.0])] = value
        peaks = torch.zeros(rows, parts * PEAK_DIGITS, dtype=torch.bfloat16)
        for part, own in enumerate(logits.split(widths, dim=1)):
            peaks += part_peaks(own.contiguous(), sum(widths[:part]), part, parts)
        assert best_peak(peaks).tolist() == argmax(logits).tolist()


@pytest.mark.skipif(cc.refusal("cpu_argmax") is not None, reason=f"{cc.refusal('cpu_argmax')}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_argmax_in_c_is_the_reference_s(dtype: torch.dtype) -> None:
    for _ in range(60):
        rows, columns = random.randint(0, 5), random.randint(1, 500)
        logits = (torch.randn(rows, columns) * 3).round().to(dtype)  # with equals
        for value in random.sample([float("nan"), float("inf"), -float("inf"), 3.2e38], random.randint(0, 4)):
            logits[torch.rand(rows, columns) < random.choice([0.01, 0.3, 1.0])] = value
        out = torch.full((rows,), -7, dtype=torch.int32)
        assert compiled_argmax.argmax(logits, out=out) is out
        assert out.tolist() == reference.argmax(logits).tolist()
    wide = torch.randn(3, 2 * 77).to(dtype)
    assert compiled_argmax.argmax(wide[:, 5:82]).tolist() == reference.argmax(wide[:, 5:82]).tolist()
