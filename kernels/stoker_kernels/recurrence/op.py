"""Recurrences over ragged rows, whose states rest by slot and are updated in place.

Tokens that may be taken back go through `try_*`, which leave states as they are and keep in a `Tried` what the tokens
would do to them; `settle_*` then does it, for all layers at once and as many tokens of each row as count. So a state is
read twice and written once for a step, whatever the number of drafts, and no state needs room but its own.

Invariants: prompts in chunks and tokens one by one give the same states, up to rounding; states of rows that are not
in the step, and of padding, stay as they are; padded tokens give zeros. A row whose `seq_lens` are its tokens begins
anew: what lies in its slot counts for nothing. States are fp32, those of convolutions of the data's dtype.
Knows nothing of projections, and of who has which slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import Target, reference_supports, register, select, triton_supports
from stoker_kernels.recurrence.types import DELTA_CHUNK, DraftRows, RecurrentRows, Tried

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
    *((f"try_{name}", "triton_try") for name in ("conv", "mamba2", "delta_rule")),
    *((f"settle_{name}", "triton_settle") for name in ("conv", "mamba2", "delta_rule")),
):
    register(_op, "triton", f"{_FOLDER}.{_module}:{_op}", _supports)
    _defined = "reference_drafts" if _op.startswith(("try_", "settle_")) else "reference"
    register(_op, "reference", f"{_FOLDER}.{_defined}:{_op}", reference_supports)


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


def try_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, rows: DraftRows, tried: Tried) -> Tensor:
    """`causal_conv` of tokens that may be taken back: `x [T,C]` → `[T,C]`, which is a part of `tried.mixed`.

    Fills `inputs` and `mixed` of `tried`, the layer's; `state` stays. Raises as `causal_conv`.
    """
    width = weight.shape[1]
    if state.shape[1:] != (width - 1, x.shape[1]) or state.dtype != x.dtype or weight.shape[0] != x.shape[1]:
        raise ValueError(f"try_conv: x {list(x.shape)}, weight {list(weight.shape)}, state {list(state.shape)}")
    _check_rows("try_conv", x, rows, tried)
    y: Tensor = select("try_conv", x.device, x.dtype)(x, state, weight, bias, rows, tried)
    return y


def try_mamba2(
    xbc: Tensor, dt: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, rows: DraftRows, tried: Tried
) -> Tensor:
    """`mamba2_scan` of tokens that may be taken back; `xbc` is what `try_conv` gave. Fills `tried.gates`: Δ and decay.

    `state` stays. Raises as `mamba2_scan`.
    """
    _, heads, head_dim, size = state.shape
    groups, rest = divmod(xbc.shape[1] - heads * head_dim, 2 * size)
    if rest or groups < 1 or heads % groups or dt.shape[1] != heads or state.dtype != torch.float32:
        raise ValueError(f"try_mamba2: xbc {list(xbc.shape)}, dt {list(dt.shape)}, state {list(state.shape)}")
    _check_rows("try_mamba2", xbc, rows, tried)
    y: Tensor = select("try_mamba2", xbc.device, xbc.dtype)(xbc, dt, a_log, d, dt_bias, state, rows, tried)
    return y


def try_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: DraftRows, tried: Tried
) -> Tensor:
    """`gated_delta_rule` of tokens that may be taken back; `qkv` is what `try_conv` gave. Fills `tried.gates`: β and
    decay. `state` stays. Raises as `gated_delta_rule`.
    """
    _, heads, key, value = state.shape
    key_heads, rest = divmod(qkv.shape[1] - heads * value, 2 * key)
    fits = not rest and key_heads >= 1 and heads % key_heads == 0 and a.shape == b.shape and a.stride() == b.stride()
    if not fits or a.shape[1] != heads or state.dtype != torch.float32:
        raise ValueError(f"try_delta_rule: qkv {list(qkv.shape)}, a {list(a.shape)}, state {list(state.shape)}")
    _check_rows("try_delta_rule", qkv, rows, tried)
    o: Tensor = select("try_delta_rule", qkv.device, qkv.dtype)(qkv, b, a, a_log, dt_bias, state, rows, tried)
    return o


def settle_conv(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """Let the first `taken [R]` int32 tokens of each row count: `state [layers,slots,W-1,C]` moves on by as many.

    `tried` is of all layers, with as many tokens a row as were tried; `slots [R]` as in `DraftRows`, `taken` 0 for
    padding, its elements perhaps apart. Raises ValueError, KernelUnavailable.
    """
    _check_settled("settle_conv", state, tried, slots, taken)
    select("settle_conv", state.device, state.dtype)(state, tried, slots, taken)


def settle_mamba2(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """The same for the states of Mamba-2, `[layers,slots,H,P,N]` fp32."""
    _check_settled("settle_mamba2", state, tried, slots, taken)
    select("settle_mamba2", state.device, tried.mixed.dtype)(state, tried, slots, taken)


def settle_delta_rule(state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    """The same for the states of the delta rule, `[layers,slots,H,K,V]` fp32."""
    _check_settled("settle_delta_rule", state, tried, slots, taken)
    select("settle_delta_rule", state.device, tried.mixed.dtype)(state, tried, slots, taken)


def _check_rows(op: str, x: Tensor, rows: DraftRows, tried: Tried) -> None:
    tokens = rows.count * rows.steps
    if x.shape[0] != tokens or rows.seq_lens.shape[0] != tokens or len(tried.mixed) < tokens:
        raise ValueError(
            f"{op}: {rows.count} rows of {rows.steps} tokens, x {list(x.shape)}, room for {len(tried.mixed)}"
        )


def _check_settled(op: str, state: Tensor, tried: Tried, slots: Tensor, taken: Tensor) -> None:
    if len(state) != len(tried.inputs) or slots.shape != taken.shape or taken.dtype != torch.int32:
        raise ValueError(f"{op}: state {list(state.shape)}, tried {list(tried.inputs.shape)}, rows {list(slots.shape)}")
