"""The gated RMS norm, and the gate of attention, against their definitions."""

from __future__ import annotations

import pytest
import torch

from stoker_kernels.activation import sigmoid_mul
from stoker_kernels.norm import gated_rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_groups_are_normed_beside_their_gate(
    shared: bool, gate_first: bool, dtype: torch.dtype, device: torch.device
) -> None:
    group, parts = 21, 3
    wide = torch.randn(4, 2 * group * parts + 5, device=device).to(dtype)
    x, gate = wide[:, : group * parts], wide[:, -group * parts :]
    weight = torch.randn(group if shared else group * parts, device=device).to(dtype)
    got = gated_rms_norm(x, gate, weight, 1e-5, group=group, gate_first=gate_first)
    for part in range(parts):
        at = slice(part * group, (part + 1) * group)
        value, opened = x[:, at].float(), torch.nn.functional.silu(gate[:, at].float())
        value = value * opened if gate_first else value
        normed = torch.nn.functional.rms_norm(value, (group,), weight[slice(0, group) if shared else at].float(), 1e-5)
        expected = normed if gate_first else normed * opened
        torch.testing.assert_close(got[:, at].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_is_let_through_by_its_gate(dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(3, 3000, device=device).to(dtype)
    x, gate = wide[:, :1400], wide[:, 1400:2800]
    expected = x.float() * torch.sigmoid(gate.float())
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(sigmoid_mul(x, gate).float(), expected, atol=limit, rtol=limit)
    with pytest.raises(ValueError, match=r"weight \[3\]"):
        gated_rms_norm(x, gate, wide[0, :3], 1e-5, group=700, gate_first=True)
