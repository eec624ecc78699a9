"""Recurrences over ragged rows, whose states rest by slot and are updated in place.

Invariants: prompts in chunks and tokens one by one give the same states, up to rounding; states of rows that are not
in the step, and of padding, stay as they are; padded tokens give zeros. A row whose `seq_lens` are its tokens begins
anew: what lies in its slot counts for nothing. States are fp32, those of convolutions of the data's dtype.
Knows nothing of projections, and of who has which slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import Target, reference_supports, register, select, triton_supports
from stoker_kernels.recurrence.types import DELTA_CHUNK, RecurrentRows

_FOLDER = "stoker_kernels.recurrence"
_takes = triton_supports(torch.bfloat16, torch.float16, torch.float32)


def _supports(target: Target) -> str | None:
    if target.device == "cuda" and target.sm < 80:
        return "needs sm_80 or newer"
    return _takes(target)


for _op, _module in (
    ("causal_conv", "triton_conv"),
    ("mamba2_scan", "triton_mamba2"),
    ("gated_delta_rule", "triton_delta"),
):
    register(_op, "triton", f"{_FOLDER}.{_module}:{_op}", _supports)
    register(_op, "reference", f"{_FOLDER}.reference:{_op}", reference_supports)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows) -> Tensor:
    """A convolution of each channel over the last W tokens of its sequence, then SiLU: `x [T,C]` → `[T,C]`.

    `state [slots,W-1,C]` of x's dtype holds the last inputs of a sequence, the oldest first; `weight [C,W]`, the
    oldest first, `bias [C]`. x's rows may be strided. Raises ValueError for shapes that do not fit, KernelUnavailable.
    """
    width = weight.shape[1]
    if state.shape[1:] != (width - 1, x.shape[1]) or state.dtype != x.dtype or weight.shape[0] != x.shape[1]:
        raise ValueError(f"causal_conv: x {list(x.shape)}, weight {list(weight.shape)}, state {list(state.shape)}")
    y: Tensor = select("causal_conv", x.device, x.dtype)(x, state, weight, bias, rows)
    return y


def mamba2_scan(
    xbc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, rows: RecurrentRows
) -> Tensor:
    """Mamba-2's state space (Dao & Gu 2024), for each head: S = e^(Δ·A)·S + Δ·x·Bᵀ, y = S·C + D·x → `[T,H·P]`.

    `xbc [T,H·P+2·G·N]`: x of all heads, then B and C of G groups, which H/G neighbouring heads share. `dt [T,H]`,
    whose softplus with `dt_bias [H]` added is Δ; A = -e^a_log; `a_log`, `d`, `dt_bias` `[H]` fp32;
    `state [slots,H,P,N]` fp32. Rows of `xbc` and `dt` may be strided. Raises ValueError, KernelUnavailable.
    """
    _, heads, head_dim, size = state.shape
    groups, rest = divmod(xbc.shape[1] - heads * head_dim, 2 * size)
    if rest or groups < 1 or heads % groups or dt.shape[1] != heads or state.dtype != torch.float32:
        raise ValueError(f"mamba2_scan: xbc {list(xbc.shape)}, dt {list(dt.shape)}, state {list(state.shape)}")
    y: Tensor = select("mamba2_scan", xbc.device, xbc.dtype)(xbc, dt, a_log, d, dt_bias, state, rows)
    return y


def gated_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: RecurrentRows
) -> Tensor:
    """The gated delta rule (Yang et al. 2024), for each value head: S = e^g·S, S += k·(β·(v - Sᵀ·k))ᵀ, o = Sᵀ·q.

    `qkv [T,2·Hk·K+H·V]`: queries and keys of Hk heads, which H/Hk neighbouring value heads share, then values; queries
    and keys are brought to length 1 (ε 1e-6), queries then by K^-½. β = sigmoid(`b [T,H]`), g = -e^a_log ·
    softplus(`a [T,H]` + dt_bias), `a_log`, `dt_bias` `[H]` fp32; `state [slots,H,K,V]` fp32. Rows of `qkv`, `b`, `a`
    may be strided, those of b and a alike. → `[T,H·V]`. Raises ValueError, KernelUnavailable.
    """
    _, heads, key, value = state.shape
    key_heads, rest = divmod(qkv.shape[1] - heads * value, 2 * key)
    fits = not rest and key_heads >= 1 and heads % key_heads == 0 and a.shape == b.shape and a.stride() == b.stride()
    if not fits or a.shape[1] != heads or state.dtype != torch.float32:
        raise ValueError(f"gated_delta_rule: qkv {list(qkv.shape)}, a {list(a.shape)}, state {list(state.shape)}")
    o: Tensor = select("gated_delta_rule", qkv.device, qkv.dtype)(qkv, b, a, a_log, dt_bias, state, rows)
    return o


def scratch_values(heads: int) -> int:
    """fp32 values that `gated_delta_rule` of so many value heads takes besides, for each token of a prompt."""
    return heads * DELTA_CHUNK
