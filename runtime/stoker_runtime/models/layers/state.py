"""A layer with a state between its first projection and its last: a short convolution, the recurrence, a gated norm.

Invariants: no branch on values and no wait for the device; states are updated in place, by slot, but those of a step
whose tokens may be taken back, which leaves beside them what these would do.
Knows nothing of who has which slot, and of how the recurrences are computed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stoker_kernels.norm import gated_rms_norm, mean_squares, rms_norm_by
from stoker_kernels.recurrence import (
    RecurrentRows,
    Tried,
    causal_conv,
    gated_delta_rule,
    mamba2_scan,
    try_conv,
    try_delta_rule,
    try_mamba2,
)
from stoker_runtime.models.decoder_weights import StateWeights
from stoker_runtime.models.inputs import ForwardInputs
from stoker_runtime.models.layer_specs.state_spec import Mixer
from stoker_runtime.models.spec import ModelSpec


def pass_states(
    spec: ModelSpec,
    weights: StateWeights,
    projected: Tensor,
    gates: Tensor | None,
    inputs: ForwardInputs,
    kept: tuple[Tensor, ...],
    of_all: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """`projected [T, P]`, and `gates` where they were projected apart → what the heads give, normed, side by side
    `[T, H·D]`. Writes `kept`: windows and states, or what tokens that may be taken back would do to them. `of_all`:
    from the mean squares of a rank's part of a group those of the group, which so many ranks share.
    """
    state = spec.recurrent
    assert state is not None, "a layer with a state is of a model that has them"
    if state.kind is Mixer.MAMBA2:
        gate, mixed, dt = projected.split((state.inner, state.channels, state.heads), dim=1)
        given = _mamba2(weights, mixed, dt, inputs, kept)
        if state.sharing > 1:
            means = of_all(mean_squares(given, [state.inner], gate=gate), state.sharing)
            return rms_norm_by(given, [weights.norm], means, spec.eps, gate=gate)
        group = state.inner // state.groups
        return gated_rms_norm(given, gate, weights.norm, spec.eps, group=group, gate_first=True)
    if gates is None:
        projected, gates = projected.split((state.channels + state.inner, state.gates), dim=1)
    mixed, gate = projected.split((state.channels, state.inner), dim=1)
    b, a = gates.split((state.heads, state.heads), dim=1)
    given = _delta_rule(weights, mixed, b, a, inputs, kept)
    return gated_rms_norm(given, gate, weights.norm, spec.eps, group=state.head_dim, gate_first=False)


def _mamba2(
    weights: StateWeights, mixed: Tensor, dt: Tensor, inputs: ForwardInputs, kept: tuple[Tensor, ...]
) -> Tensor:
    assert weights.skip is not None, "Mamba-2 lets its input through"
    window, held, *tries = kept
    steps = (weights.a_log, weights.skip, weights.dt_bias)
    if inputs.drafts is None:
        rows = _rows(inputs)
        mixed = causal_conv(mixed, window, weights.conv, weights.conv_bias, rows)
        return mamba2_scan(mixed, dt, *steps, held, rows)
    tried = Tried(*tries)
    mixed = try_conv(mixed, window, weights.conv, weights.conv_bias, inputs.drafts, tried)
    return try_mamba2(mixed, dt, *steps, held, inputs.drafts, tried)


def _delta_rule(
    weights: StateWeights, mixed: Tensor, b: Tensor, a: Tensor, inputs: ForwardInputs, kept: tuple[Tensor, ...]
) -> Tensor:
    window, held, *tries = kept
    if inputs.drafts is None:
        rows = _rows(inputs)
        mixed = causal_conv(mixed, window, weights.conv, weights.conv_bias, rows)
        return gated_delta_rule(mixed, b, a, weights.a_log, weights.dt_bias, held, rows)
    tried = Tried(*tries)
    mixed = try_conv(mixed, window, weights.conv, weights.conv_bias, inputs.drafts, tried)
    return try_delta_rule(mixed, b, a, weights.a_log, weights.dt_bias, held, inputs.drafts, tried)


def _rows(inputs: ForwardInputs) -> RecurrentRows:
    meta = inputs.attention
    return RecurrentRows(meta.seq_slots, meta.query_start, meta.seq_lens, meta.num_decodes, meta.max_query_len)
