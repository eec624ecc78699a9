"""Layers with a state once more, as plainly as PyTorch can say it: a part of the oracle `reference.model`.

Invariants: fp32 throughout, token by token over a whole sequence; nothing but the weights in common with the engine.
Knows nothing of slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker_runtime.models.decoder_weights import StateWeights
from stoker_runtime.models.layer_specs.state_spec import Mixer, StateSpec


def state_heads(state: StateSpec, weights: StateWeights, projected: Tensor, eps: float) -> Tensor:
    """`projected [T, P]` fp32 → what the heads give, normed, side by side `[T, H·D]`."""
    mamba = state.kind is Mixer.MAMBA2
    wide = (state.inner, state.channels) if mamba else (state.channels, state.inner)
    first, second, rest = projected.split((*wide, projected.shape[1] - sum(wide)), dim=1)
    gate, mixed = (first, second) if mamba else (second, first)
    padded = F.pad(mixed, (0, 0, state.taps - 1, 0))
    # Tap by tap, because a library's convolution may round what it multiplies.
    taps = [padded[tap : tap + len(mixed)] * weights.conv[:, tap].float() for tap in range(state.taps)]
    bias = 0.0 if weights.conv_bias is None else weights.conv_bias.float()
    mixed = F.silu(torch.stack(taps).sum(0) + bias)
    given = (_mamba2 if mamba else _delta)(state, weights, mixed, rest)
    if mamba:
        groups = (given * F.silu(gate)).unflatten(1, (state.groups, -1))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        return torch.mul(normed.flatten(1), weights.norm.float())
    heads = given.unflatten(1, (state.heads, -1))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weights.norm.float()
    return torch.mul(normed.flatten(1), F.silu(gate))


def _mamba2(state: StateSpec, weights: StateWeights, mixed: Tensor, dt: Tensor) -> Tensor:
    assert weights.skip is not None, "Mamba-2 lets its input through"
    x, b, c = mixed.split((state.inner, *((state.channels - state.inner) // 2,) * 2), dim=1)
    x = x.unflatten(1, (state.heads, state.head_dim))
    each = state.heads // state.groups
    b, c = (part.unflatten(1, (state.groups, -1)).repeat_interleave(each, dim=1) for part in (b, c))
    steps = F.softplus(dt + weights.dt_bias)
    held = x.new_zeros(state.shape)
    found = []
    for at in range(len(x)):
        fade = torch.exp(-weights.a_log.exp() * steps[at])
        held = held * fade[:, None, None] + torch.einsum("h,hp,hn->hpn", steps[at], x[at], b[at])
        found.append(torch.einsum("hpn,hn->hp", held, c[at]) + weights.skip[:, None] * x[at])
    return torch.stack(found).flatten(1)


def _delta(state: StateSpec, weights: StateWeights, mixed: Tensor, gates: Tensor) -> Tensor:
    keys, each = state.groups * state.size, state.heads // state.groups
    q, k, v = mixed.split((keys, keys, state.inner), dim=1)
    q, k = (F.normalize(part.unflatten(1, (state.groups, -1)), dim=-1, eps=1e-9) for part in (q, k))
    q, k = (part.repeat_interleave(each, dim=1) for part in (q * state.size**-0.5, k))
    v = v.unflatten(1, (state.heads, -1))
    learned, forgotten = gates.chunk(2, dim=1)
    fades = torch.exp(-weights.a_log.exp() * F.softplus(forgotten + weights.dt_bias))
    held = v.new_zeros(state.shape)
    found = []
    for at in range(len(v)):
        held = held * fades[at][:, None, None]
        missing = (v[at] - torch.einsum("hkv,hk->hv", held, k[at])) * torch.sigmoid(learned[at])[:, None]
        held = held + torch.einsum("hk,hv->hkv", k[at], missing)
        found.append(torch.einsum("hkv,hk->hv", held, q[at]))
    return torch.stack(found).flatten(1)
