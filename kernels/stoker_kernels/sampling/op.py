"""Choosing tokens on the device: argmax, and sampling with temperature, filters, penalties and bias.

Invariants: a row's token depends on its logits, its slot's parameters, its seed and its position alone: never on the
other rows, on the size of the batch, or on the device. To that end probabilities are integers (`2⁴⁰ · p / p_max`,
truncated, by an exponential of exactly rounded steps), so that sums do not depend on their order, and the reference
and the kernels agree bit for bit.
The token is found by inverting the cumulative distribution in order of ids, at a point drawn by Philox 4x32-10
(Salmon et al. 2011) from (seed, position): one draw a row, and no sort of the vocabulary.
Filters keep all tokens that tie with the last one kept.
Knows nothing of stop conditions, of text, or of grammars beyond their bitmask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.compiled import compiled_supports
from stoker_kernels.launch.dispatch import (
    Target,
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)
from stoker_kernels.sampling.state import SamplingState

MAX_TOP_LOGPROBS = 20
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _sm90_supports(target: Target) -> str | None:
    if target.device != "cuda" or not chip_of(target.sm).wgmma:
        return "needs sm_90"
    return cuda.missing_cubin("sm90_sample", "sm_90a") if target.dtype == torch.bfloat16 else "takes bfloat16"


register("sample", "sm90", "stoker_kernels.sampling.sm90_sample:sample", _sm90_supports, invariant=True)
for _op in ("argmax", "sample", "token_logprobs"):
    _path = f"stoker_kernels.sampling.triton_sampling:{_op}"
    register(_op, "triton", _path, triton_supports(*LOGITS_DTYPES), invariant=True)
    if _op == "argmax":
        _compiled = "stoker_kernels.sampling.compiled_argmax:argmax"
        register(_op, "compiled", _compiled, compiled_supports("cpu_argmax"), invariant=True)
    # Of integers and of what is exact, sums have one result; of exponentials they do not.
    _exact = _op != "token_logprobs"
    register(_op, "reference", f"stoker_kernels.sampling.reference:{_op}", reference_supports, invariant=_exact)
register_invariant(
    "token_logprobs", "rows", "stoker_kernels.sampling.rows:token_logprobs", cpu_supports(*LOGITS_DTYPES)
)


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`logits [R,V]` → `[R]` int32: the highest logit's id, the lowest of equals; NaN counts as −inf."""
    tokens: Tensor = select("argmax", logits.device, logits.dtype)(logits, out=out)
    return tokens


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
    """Choose a token for each row → `[R]` int32; a padding row (slot < 0) gets −1.

    `logits [R,V]`; `row_slots`, `positions` `[R]` int32, the position being that of the token just run; `bitmask
    [R, ceil(V/32)]` int32, bit i of word w allows token 32·w + i. `adjust=False` promises that no row has penalties,
    bias or suppressed tokens, and that there is no bitmask: they are then not looked at.
    Order: bitmask, bias, penalties (repetition, frequency, presence), temperature, min-p, top-k, top-p. Greedy rows
    (temperature 0) take the argmax of the adjusted logits. The counts of penalized slots are brought up to date.
    A row whose every token is forbidden gets token 0.

    Raises:
        ValueError: a bitmask with `adjust=False`, or more rows than the state has slots.
    """
    if bitmask is not None and not adjust:
        raise ValueError("a bitmask needs adjust=True")
    if logits.shape[0] > state.params.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows do not fit a state of {state.params.shape[0]} slots")
    tokens: Tensor = select("sample", logits.device, logits.dtype)(
        logits, state, row_slots, positions, adjust=adjust, bitmask=bitmask, out=out
    )
    return tokens


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """`logits [R,V]`, `tokens [R]` int32 → fp32 `[R, 2 + 2·top]`: log-probability, rank (1 = best), ids, values.

    From the raw logits in fp32. The `top` best follow best first, equals in no promised order; ids are exact in fp32
    for vocabularies below 2²⁴. A token below 0 (padding) gets NaN.

    Raises:
        ValueError: `top` outside 0…20, or above V.
    """
    if not 0 <= top <= min(MAX_TOP_LOGPROBS, logits.shape[1]):
        raise ValueError(f"top is between 0 and {MAX_TOP_LOGPROBS}, and at most the vocabulary; got {top}")
    packed: Tensor = select("token_logprobs", logits.device, logits.dtype)(logits, tokens, top)
    return packed
