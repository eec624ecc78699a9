"""Sampling in plain PyTorch: the oracle of the tests and the CPU backend.

Invariants: tokens equal those of the Triton kernels for the same state, because both compute the same integers:
every floating-point step below is a single, exactly rounded operation that the kernels repeat in the same order.
Knows nothing of tiles or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.sampling_state import (
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


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The id of each row's highest logit, the lowest of equals."""
    tokens = _finite(logits).argmax(dim=-1).to(torch.int32)
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
    """One row after the other, as `sampling.sample` defines it."""
    tokens = torch.full_like(row_slots, -1)
    for row, (slot, position) in enumerate(zip(row_slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        values = _finite(logits[row])
        if adjust:
            values = _adjusted(values, state, slot, position, None if bitmask is None else bitmask[row])
        token = _choose(values, state.params[slot], position)
        tokens[row] = token
        if adjust and state.params[slot, Param.PENALIZED]:
            word = state.counts[slot, token]
            state.counts[slot, token] = word + int((int(word) & MAX_COUNT) < MAX_COUNT)
    return tokens if out is None else out.copy_(tokens)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Log-probability and rank of `tokens`, then the `top` best ids and their values."""
    values = _finite(logits)
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


def _finite(logits: Tensor) -> Tensor:
    """fp32 without NaN or +inf, which no comparison or difference below could carry."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=3e38, neginf=-torch.inf)


def _float_param(params: Tensor, column: Param) -> Tensor:
    return params[column : column + 1].view(torch.float32)[0]


def _adjusted(values: Tensor, state: SamplingState, slot: int, position: int, mask: Tensor | None) -> Tensor:
    params = state.params[slot]
    vocab = values.shape[0]
    if mask is not None:
        token = torch.arange(vocab, device=values.device)
        values = values.masked_fill((mask[token // 32] >> (token % 32)) & 1 == 0, -torch.inf)
    count = int(params[Param.BIAS_COUNT])
    active = state.bias_until[slot, :count] > position
    ids, bias = state.bias_ids[slot, :count][active].long(), state.bias_values[slot, :count][active]
    # One after the other: an id may be both biased and suppressed.
    for token_id, value in zip(ids, bias, strict=True):
        values[token_id] += value
    if not params[Param.PENALIZED]:
        return values
    words = state.counts[slot].to(torch.int32)
    outputs, seen = words & MAX_COUNT, words != 0
    repetition = _float_param(params, Param.REPETITION)
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    values = values - outputs.float() * _float_param(params, Param.FREQUENCY)
    return values - (outputs > 0).float() * _float_param(params, Param.PRESENCE)


def _choose(values: Tensor, params: Tensor, position: int) -> int:
    peak = values.max()
    temperature = _float_param(params, Param.TEMPERATURE)
    if temperature == 0.0 or peak == -torch.inf:
        return int(values.argmax())
    weights = _weights(values, peak, temperature, _float_param(params, Param.MIN_P))
    top_k, top_p = int(params[Param.TOP_K]), _float_param(params, Param.TOP_P)
    if 0 < top_k < len(values):
        weights = torch.where(values >= values.topk(top_k).values[-1], weights, 0)
    if top_p < 1.0:
        target = (top_p.double() * weights.sum().double()).long().clamp_min(1)
        kept = weights.nonzero()[:, 0]
        best, order = values[kept].sort(descending=True)
        last = int((weights[kept][order].cumsum(0) < target).sum())
        weights = torch.where(values >= best[last], weights, 0)
    point = _draw(int(params[Param.SEED_LOW]), int(params[Param.SEED_HIGH]), position, int(weights.sum()))
    return int((weights.cumsum(0) <= point).sum())


def _weights(values: Tensor, peak: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """int64 `2⁴⁰ · exp((value - peak) / temperature)`, truncated; 0 below `min_p · 2⁴⁰`."""
    factor = (1.0 / temperature) * torch.tensor(LOG2E, dtype=torch.float32)
    exponent = ((values - peak) * factor).clamp_min(MIN_EXPONENT)
    whole = exponent.floor()
    part = exponent - whole
    mantissa = torch.full_like(part, EXP2_COEFFICIENTS[0])
    for coefficient in (*EXP2_COEFFICIENTS[1:], 1.0):
        mantissa = mantissa * part + coefficient
    scale = (whole.to(torch.int32) + 127 + WEIGHT_BITS << 23).view(torch.float32)
    weights = (mantissa * scale).to(torch.int64)
    least = (min_p.double() * float(1 << WEIGHT_BITS)).long().clamp_min(1)
    return torch.where(weights >= least, weights, 0)


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
