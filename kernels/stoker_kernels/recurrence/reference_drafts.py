"""Tokens that may be taken back, in plain PyTorch: oracle and CPU backend.

Invariants: the signatures and effects are those of `op.py`; arithmetic is fp32 with one rounding, and the recurrences
are those of `reference.py`, token by token.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.recurrence.types import DraftRows, Tried


def _turns(rows: DraftRows) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, tokens) of the rows that have a first token, a second one, …."""
    for turn in range(rows.steps):
        lens = rows.seq_lens[turn * rows.count : (turn + 1) * rows.count]
        here = ((rows.slots >= 0) & (lens > 0)).nonzero().view(-1)
        yield here, turn * rows.count + here


def _taken(slots: Tensor, taken: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(slots, tokens) that count, turn by turn."""
    for turn in range(int(taken.max()) if len(taken) else 0):
        here = ((slots >= 0) & (taken > turn)).nonzero().view(-1)
        yield slots[here].long(), turn * len(slots) + here


def try_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, rows: DraftRows, tried: Tried) -> Tensor:
    """By definition, over copies of the windows."""
    gain, shift = weight.float().t(), 0.0 if bias is None else bias.float()
    windows = state[rows.slots.clamp(min=0).long()]
    y = tried.mixed[: len(x)].zero_()
    for here, tokens in _turns(rows):
        window = torch.cat((windows[here], x[tokens].unsqueeze(1)), dim=1)
        y[tokens] = functional.silu((window.float() * gain).sum(1) + shift).to(x.dtype)
        tried.inputs[tokens] = x[tokens]
        windows[here] = window[:, 1:]
    return y


def try_mamba2(
    xbc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, rows: DraftRows, tried: Tried
) -> Tensor:
    """By definition, over copies of the states."""
    _, heads, head_dim, _ = state.shape
    y = torch.zeros((len(xbc), heads * head_dim), dtype=xbc.dtype, device=xbc.device)
    states = state[rows.slots.clamp(min=0).long()]
    for here, tokens in _turns(rows):
        delta = functional.softplus(dt[tokens].float() + dt_bias)
        tried.gates[tokens] = torch.stack((delta, torch.exp(-a_log.exp() * delta)), dim=1)
        x, b, c = _mamba2_parts(xbc[tokens], state)
        states[here] = _mamba2_next(states[here], tried.gates[tokens], x, b)
        y[tokens] = ((states[here] * c[..., None, :]).sum(-1) + d[:, None] * x).flatten(1).to(xbc.dtype)
    return y


def try_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: DraftRows, tried: Tried
) -> Tensor:
    """By definition, over copies of the states."""
    _, heads, key, value = state.shape
    o = torch.zeros((len(qkv), heads * value), dtype=qkv.dtype, device=qkv.device)
    states = state[rows.slots.clamp(min=0).long()]
    for here, tokens in _turns(rows):
        decay = torch.exp(-a_log.exp() * functional.softplus(a[tokens].float() + dt_bias))
        tried.gates[tokens] = torch.stack((torch.sigmoid(b[tokens].float()), decay), dim=1)
        q, k, v = _delta_parts(qkv[tokens], state)
        states[here] = _delta_next(states[here], tried.gates[tokens], k, v)
        o[tokens] = (states[here] * (q * key**-0.5)[..., None]).sum(-2).flatten(1).to(qkv.dtype)
    return o


def settle_conv(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """Input by input."""
    for there, tokens in _taken(slots, taken):
        state[:, there] = torch.cat((state[:, there], tried.inputs[:, tokens].unsqueeze(2)), dim=2)[:, :, 1:]


def settle_mamba2(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """Token by token."""
    for there, tokens in _taken(slots, taken):
        x, b, _ = _mamba2_parts(tried.mixed[:, tokens], state)
        state[:, there] = _mamba2_next(state[:, there], tried.gates[:, tokens], x, b)


def settle_delta_rule(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """Token by token."""
    for there, tokens in _taken(slots, taken):
        _, k, v = _delta_parts(tried.mixed[:, tokens], state)
        state[:, there] = _delta_next(state[:, there], tried.gates[:, tokens], k, v)


def _mamba2_parts(xbc: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x `[…, H, P]`, and B and C of each head `[…, H, N]`."""
    heads, head_dim, size = state.shape[-3:]
    x, both = xbc.float().split((heads * head_dim, xbc.shape[-1] - heads * head_dim), dim=-1)
    b, c = both.unflatten(-1, (2, -1, size)).unbind(-3)
    times = heads // b.shape[-2]
    return x.unflatten(-1, (heads, head_dim)), b.repeat_interleave(times, -2), c.repeat_interleave(times, -2)


def _mamba2_next(state: Tensor, gates: Tensor, x: Tensor, b: Tensor) -> Tensor:
    delta, decay = gates.unbind(-2)
    return decay[..., None, None] * state + (delta[..., None] * x)[..., None] * b[..., None, :]


def _delta_parts(qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of each head, of length 1, `[…, H, K]`, and values `[…, H, V]`."""
    heads, key, value = state.shape[-3:]
    width = (qkv.shape[-1] - heads * value) // 2
    q, k, v = qkv.float().split((width, width, heads * value), dim=-1)
    both = (each.unflatten(-1, (-1, key)) for each in (q, k))
    both = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in both)
    q, k = (each.repeat_interleave(heads // each.shape[-2], -2) for each in both)
    return q, k, v.unflatten(-1, (heads, value))


def _delta_next(state: Tensor, gates: Tensor, k: Tensor, v: Tensor) -> Tensor:
    beta, decay = gates.unbind(-2)
    faded = state * decay[..., None, None]
    missing = (v - (faded * k[..., None]).sum(-2)) * beta[..., None]
    return faded + k[..., None] * missing[..., None, :]
