"""The recurrences in plain PyTorch, token by token: oracle and CPU backend.

Invariants: the signatures and effects are those of `op.py`; arithmetic is fp32 with one rounding. The rows of a step
go side by side, first tokens first, so that a step of decodes is one turn of the loop.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from stoker_kernels.recurrence.types import RecurrentRows


def _turns(rows: RecurrentRows, state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(slots, tokens) of the rows that have a first token, a second one, …; states of new sequences become zeros."""
    starts, lens = rows.query_start.tolist(), rows.seq_lens.tolist()
    spans = [
        (slot, starts[row], starts[row + 1]) for row, slot in enumerate(rows.slots.tolist()) if lens[row] and slot >= 0
    ]
    for row, slot in enumerate(rows.slots.tolist()):
        if slot >= 0 and lens[row] == starts[row + 1] - starts[row] and lens[row]:
            state[slot] = 0
    longest = max((end - begin for _, begin, end in spans), default=0)
    for turn in range(longest):
        here = [(slot, begin + turn) for slot, begin, end in spans if begin + turn < end]
        slots, tokens = torch.tensor(here, device=state.device).unbind(1)
        yield slots, tokens


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows) -> Tensor:
    """By definition, from a window of inputs that moves."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    gain, shift = weight.float().t(), 0.0 if bias is None else bias.float()
    for slots, tokens in _turns(rows, state):
        window = torch.cat((state[slots], x[tokens].unsqueeze(1)), dim=1)
        y[tokens] = functional.silu((window.float() * gain).sum(1) + shift).to(x.dtype)
        state[slots] = window[:, 1:]
    return y


def mamba2_scan(
    xbc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, rows: RecurrentRows
) -> Tensor:
    """By definition."""
    _, heads, head_dim, size = state.shape
    inner = heads * head_dim
    y = torch.zeros((xbc.shape[0], inner), dtype=xbc.dtype, device=xbc.device)
    groups = (xbc.shape[1] - inner) // (2 * size)
    for slots, tokens in _turns(rows, state):
        now = xbc[tokens].float()
        x = now[:, :inner].view(-1, heads, head_dim)
        both = now[:, inner:].view(-1, 2, groups, size).repeat_interleave(heads // groups, dim=2)
        delta = functional.softplus(dt[tokens].float() + dt_bias)
        decay = torch.exp(-a_log.exp() * delta)[..., None, None]
        fresh = decay * state[slots] + (delta[..., None] * x)[..., None] * both[:, 0, :, None, :]
        state[slots] = fresh
        y[tokens] = ((fresh * both[:, 1, :, None, :]).sum(-1) + d[:, None] * x).flatten(1).to(xbc.dtype)
    return y


def gated_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: RecurrentRows
) -> Tensor:
    """By definition."""
    _, heads, key, value = state.shape
    o = torch.zeros((qkv.shape[0], heads * value), dtype=qkv.dtype, device=qkv.device)
    width = (qkv.shape[1] - heads * value) // 2
    for slots, tokens in _turns(rows, state):
        now = qkv[tokens].float()
        q, k = (each.unflatten(1, (-1, key)) for each in (now[:, :width], now[:, width : 2 * width]))
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q, k = ((each.repeat_interleave(heads // each.shape[1], dim=1))[..., None] for each in (q * key**-0.5, k))
        v = now[:, 2 * width :].unflatten(1, (heads, value))
        decay = torch.exp(-a_log.exp() * functional.softplus(a[tokens].float() + dt_bias))
        fresh = state[slots] * decay[..., None, None]
        missing = (v - (fresh * k).sum(-2)) * torch.sigmoid(b[tokens].float())[..., None]
        fresh = fresh + k * missing[:, :, None, :]
        state[slots] = fresh
        o[tokens] = (fresh * q).sum(-2).flatten(1).to(qkv.dtype)
    return o
