"""States of a step that verifies drafts: they stay until it is known which tokens count, and then move on by those.

What the step's tokens would do to them is kept layer by layer (`stoker_kernels.recurrence.Tried`), a few numbers a
token; the other way, a copy of the states behind every token, would take `k + 1` times their memory and bandwidth.

Invariants: allocated once; nothing waits for the device or depends on values there, so a CUDA graph may capture it.
Knows nothing of where drafts come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.recurrence import Tried, settle_conv, settle_delta_rule, settle_mamba2
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.states.plan import tried_shapes
from stoker_runtime.models.layer_specs.state_spec import Mixer
from stoker_runtime.models.spec import ModelSpec


class DraftedStates:
    """What is kept of the tokens of one step, for the layers of `states`: windows and states, of all slots."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, states: tuple[Tensor, ...]
    ) -> None:
        assert spec.recurrent is not None, "nothing keeps a state"
        channels, gates = tried_shapes(config, spec)
        device = states[0].device
        self.tried = Tried(
            torch.zeros(channels, dtype=dtype, device=device),
            torch.zeros(channels, dtype=dtype, device=device),
            torch.zeros(gates, dtype=torch.float32, device=device),
        )
        self._windows, self._states = states
        self._settle = settle_mamba2 if spec.recurrent.kind is Mixer.MAMBA2 else settle_delta_rule

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, with layers in front."""
        return self.tried.inputs, self.tried.mixed, self.tried.gates

    def settle(self, row_slots: Tensor, taken: Tensor) -> None:
        """The first `taken [R]` tokens of each row of the step count."""
        settle_conv(self._windows, self.tried, row_slots, taken)
        self._settle(self._states, self.tried, row_slots, taken)
