"""Sampling in plain PyTorch: the oracle of the tests and the CPU backend.

Invariants: tokens equal those of the Triton kernels for the same state, because both compute the same integers:
every floating-point step below is a single, exactly rounded operation that the kernels repeat in the same order.
Knows nothing of tiles or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.sampling.state import (
    MAX_COUNT,
    NUM_BIAS_WORDS,
    NUM_HISTORY_WORDS,
    PARAMS,
    Param,
    SamplingState,
)

LOG2E = 1.4426950408889634
# 2^f on [0,1) with an error of 1.6e-7; the constant term is exactly 1, so that the best token weighs exactly 2⁴⁰.
EXP2_COEFFICIENTS = (
    0.0018671444850042462,
    0.00901699997484684,
    0.0557999350130558,
    0.24016444385051727,
    0.6931512951850891,
)
WEIGHT_BITS = 40
# Beyond 2⁻¹⁰⁰ every weight is zero; the bound keeps the exponent's arithmetic in range.
MIN_EXPONENT = -100.0
_PHILOX_A, _PHILOX_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
# Rows whose weights, 8 bytes a token, exist at a time.
ROWS_AT_ONCE = 32


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The id of each row's highest logit, the lowest of equals."""
    tokens = finite(logits).argmax(dim=-1).to(torch.int32)
    return tokens if out is None else out.copy_(tokens)


def sample(
    logits: Tensor,
    state: SamplingState,
    row_slots: Tensor,
    positions: Tensor,
    *,
    adjust: bool = True,
    bitmask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `sampling.sample` defines it."""
    tokens = torch.full_like(row_slots, -1)
    for rows in (row_slots >= 0).nonzero()[:, 0].split(ROWS_AT_ONCE):
        slots = row_slots[rows].long()
        values = finite(logits[rows])
        if adjust:
            masks = None if bitmask is None else bitmask[rows]
            _adjust(values, state, slots.tolist(), positions[rows].tolist(), masks)
        chosen = _choose(values, state.params[slots], positions[rows].tolist())
        tokens[rows] = chosen.to(torch.int32)
        if adjust:
            _count(state, slots, chosen)
    return tokens if out is None else out.copy_(tokens)


def adjusted(logits: Tensor, state: SamplingState, row_slots: Tensor, positions: Tensor, bitmask: Tensor) -> Tensor:
    """fp32 logits as they count: after bitmask, bias and penalties; no row is padding."""
    values = finite(logits)
    _adjust(values, state, row_slots.tolist(), positions.tolist(), bitmask)
    return values


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Log-probability and rank of `tokens`, then the `top` best ids and their values."""
    values = finite(logits)
    normalizer = torch.logsumexp(values, dim=-1, keepdim=True)
    chosen = values.gather(1, tokens.long().clamp_min(0)[:, None])
    rank = (values > chosen).sum(dim=1, keepdim=True) + 1
    best, ids = values.topk(top, dim=1)
    packed = torch.cat((chosen - normalizer, rank.float(), ids.float(), best - normalizer), dim=1)
    packed[tokens < 0] = float("nan")
    return packed


def apply(packed: Tensor, updates: int, state: SamplingState) -> None:
    """Replace the rows of the slots named by the headers."""
    for header in packed[: updates * PARAMS].view(updates, PARAMS):
        slot, count, start = (int(header[i]) for i in (Param.SLOT, Param.BIAS_COUNT, Param.BIAS_START))
        state.params[slot] = header
        bias = packed[start : start + count * NUM_BIAS_WORDS].view(count, NUM_BIAS_WORDS)
        state.bias_ids[slot, :count] = bias[:, 0]
        state.bias_values[slot, :count] = bias[:, 1].contiguous().view(torch.float32)
        state.bias_until[slot, :count] = bias[:, 2]
        if header[Param.PENALIZED]:
            count, start = int(header[Param.HISTORY_COUNT]), int(header[Param.HISTORY_START])
            history = packed[start : start + count * NUM_HISTORY_WORDS].view(count, NUM_HISTORY_WORDS)
            state.counts[slot] = 0
            state.counts[slot, history[:, 0].long()] = history[:, 1].to(torch.int16)


def finite(logits: Tensor) -> Tensor:
    """fp32 without NaN or +inf, which no comparison or difference below could carry."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=3e38, neginf=-torch.inf)


def _adjust(values: Tensor, state: SamplingState, slots: list[int], positions: list[int], masks: Tensor | None) -> None:
    """Apply bitmask, bias and penalties to the rows in place."""
    if masks is not None:
        token = torch.arange(values.shape[1], device=values.device)
        values.masked_fill_((masks[:, token // 32] >> (token % 32)) & 1 == 0, -torch.inf)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        params = state.params[slot]
        count = int(params[Param.BIAS_COUNT])
        active = state.bias_until[slot, :count] > position
        ids, bias = state.bias_ids[slot, :count][active].tolist(), state.bias_values[slot, :count][active]
        # One after the other: an id may be both biased and suppressed.
        for token_id, value in zip(ids, bias, strict=True):
            values[row, token_id] += value
        if params[Param.PENALIZED]:
            values[row] = _penalized(values[row], state.counts[slot].to(torch.int32), params.view(torch.float32))


def _penalized(values: Tensor, words: Tensor, floats: Tensor) -> Tensor:
    outputs, repetition = words & MAX_COUNT, floats[Param.REPETITION]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(words != 0, repeated, values)
    values = values - outputs.float() * floats[Param.FREQUENCY]
    return values - (outputs > 0).float() * floats[Param.PRESENCE]


def _count(state: SamplingState, slots: Tensor, tokens: Tensor) -> None:
    """Count the tokens of penalized slots, up to the largest count."""
    penalized = state.params[slots, Param.PENALIZED] != 0
    slots, tokens = slots[penalized], tokens[penalized]
    words = state.counts[slots, tokens].to(torch.int32)
    state.counts[slots, tokens] = (words + ((words & MAX_COUNT) < MAX_COUNT)).to(torch.int16)


def _choose(values: Tensor, params: Tensor, positions: list[int]) -> Tensor:
    """A token for each row of adjusted logits, by its parameters `[rows, 16]`."""
    tokens = values.argmax(dim=-1)
    floats = params.view(torch.float32)
    peak = values.amax(dim=-1)
    random = ((floats[:, Param.TEMPERATURE] > 0) & (peak > -torch.inf)).nonzero()[:, 0]
    if len(random) == 0:
        return tokens
    values, params, floats = values[random], params[random], floats[random]
    weights = _weights(values, peak[random], floats[:, Param.TEMPERATURE], floats[:, Param.MIN_P])
    for row in range(len(random)):
        _filter(values[row], weights[row], int(params[row, Param.TOP_K]), floats[row, Param.TOP_P])
    totals = weights.sum(dim=-1).tolist()
    seeds = params[:, [Param.SEED_LOW, Param.SEED_HIGH]].tolist()
    points = [
        _draw(low, high, positions[row], total)
        for (low, high), row, total in zip(seeds, random.tolist(), totals, strict=True)
    ]
    limit = torch.tensor(points, device=values.device)[:, None]
    tokens[random] = (weights.cumsum(dim=-1) <= limit).sum(dim=-1)
    return tokens


def _filter(values: Tensor, weights: Tensor, top_k: int, top_p: Tensor) -> None:
    """Zero the weights that top-k, then top-p of what is left, drop."""
    if 0 < top_k < len(values):
        weights.masked_fill_(values < values.topk(top_k).values[-1], 0)
    if top_p < 1.0:
        target = (top_p.double() * weights.sum().double()).long().clamp_min(1)
        kept = weights.nonzero()[:, 0]
        best, order = values[kept].sort(descending=True)
        last = int((weights[kept][order].cumsum(0) < target).sum())
        weights.masked_fill_(values < best[last], 0)


def exponents(values: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """`log2 (p / p_max)` `[rows, V]` of adjusted logits, at least MIN_EXPONENT."""
    factor = (1.0 / temperature) * torch.tensor(LOG2E, dtype=torch.float32)
    return ((values - peak[:, None]) * factor[:, None]).clamp_min(MIN_EXPONENT)


def weights_of(exponent: Tensor) -> Tensor:
    """int64 `2⁴⁰ · 2^exponent`, truncated."""
    whole = exponent.floor()
    part = exponent - whole
    mantissa = torch.full_like(part, EXP2_COEFFICIENTS[0])
    for coefficient in (*EXP2_COEFFICIENTS[1:], 1.0):
        mantissa = mantissa * part + coefficient
    scale = (whole.to(torch.int32) + 127 + WEIGHT_BITS << 23).view(torch.float32)
    return (mantissa * scale).to(torch.int64)


def _weights(values: Tensor, peak: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """int64 `2⁴⁰ · exp((value - peak) / temperature)` `[rows, V]`, truncated; 0 below `min_p · 2⁴⁰`."""
    weights = weights_of(exponents(values, peak, temperature))
    least = (min_p.double() * float(1 << WEIGHT_BITS)).long().clamp_min(1)
    return weights.masked_fill_(weights < least[:, None], 0)


def _draw(seed_low: int, seed_high: int, position: int, total: int) -> int:
    """A point in `[0, total)`: the high half of total times 64 random bits."""
    low, high = _philox(seed_low & _LOW, seed_high & _LOW, position & _LOW)
    return total * (high << 32 | low) >> 64


def _philox(key_a: int, key_b: int, counter: int) -> tuple[int, int]:
    """The first two of Philox 4x32-10's words for counter (counter, 0, 0, 0)."""
    c0, c1, c2, c3 = counter, 0, 0, 0
    for _ in range(10):
        product_a, product_b = _PHILOX_A * c0, _PHILOX_B * c2
        c0, c1 = (product_b >> 32) ^ c1 ^ key_a, product_b & _LOW
        c2, c3 = (product_a >> 32) ^ c3 ^ key_b, product_a & _LOW
        key_a, key_b = key_a + _KEY_A & _LOW, key_b + _KEY_B & _LOW
    return c0, c1
