"""The recurrences in Triton against their definition: any rows, any sizes, what rests where, and hard numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.kernels.recurrence.cases import Step, draw_step, resting
from torch import Tensor

from stoker_kernels.recurrence import reference, triton_conv, triton_delta, triton_mamba2

SEED = random.SystemRandom().randrange(1 << 30)
TOLERANCE = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 4e-2}
# The interpreter's numpy says what is meant: exp of what is masked, NaN in states that nobody reads.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Op = Callable[[Tensor], Tensor]


def compare(ours: Op, defined: Op, state: Tensor, step: Step, dtype: torch.dtype) -> None:
    """Results, the states that were used, and that nothing else was touched."""
    before, expected_state = state.clone(), state.clone()
    got, expected = ours(state), defined(expected_state)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)
    assert not got[step.padded].any()
    torch.testing.assert_close(state[step.used], expected_state[step.used], atol=limit, rtol=limit)
    rest = [slot for slot in range(step.slots) if slot not in step.used]
    torch.testing.assert_close(state[rest], before[rest], equal_nan=True, rtol=0, atol=0)


@pytest.mark.matrix("width")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "decodes_only"), [(4, False), (2, False), (3, True)])
def test_convolution(width: int, decodes_only: bool, dtype: torch.dtype, device: torch.device) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + width)
    torch.manual_seed(rng.randrange(1 << 30))
    step = draw_step(rng, device, [width - 1, 1, 41, rng.randrange(30, 70)], decodes_only=decodes_only)
    channels = rng.choice([37, 140])
    # A part of a wider projection.
    x = torch.randn(step.tokens, channels + 9, device=device).to(dtype)[:, 5 : 5 + channels]
    weight, bias = torch.randn(channels, width, device=device).to(dtype), torch.randn(channels, device=device).to(dtype)
    state = resting((width - 1, channels), step, dtype, device)
    for shift in (bias, None):
        compare(
            lambda held, shift=shift: triton_conv.causal_conv(x, held, weight, shift, step.rows),
            lambda held, shift=shift: reference.causal_conv(x, held, weight, shift, step.rows),
            state.clone(), step, dtype,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decodes_only", [False, True])
def test_state_space(decodes_only: bool, dtype: torch.dtype, device: torch.device) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + decodes_only)
    torch.manual_seed(rng.randrange(1 << 30))
    step = draw_step(rng, device, [70, 1, rng.randrange(2, 20)], decodes_only=decodes_only)
    groups, head_dim, size = rng.choice([1, 3]), rng.choice([12, 40]), rng.choice([10, 24])
    heads = 2 * groups
    xbc = torch.randn(step.tokens, heads * head_dim + 2 * groups * size, device=device).to(dtype)
    dt = torch.randn(step.tokens, heads + 2, device=device).to(dtype)[:, 1:-1] * 4
    a_log, d, dt_bias = torch.randn(3, heads, device=device)
    state = resting((heads, head_dim, size), step, torch.float32, device)
    compare(
        lambda held: triton_mamba2.mamba2_scan(xbc, dt, a_log, d, dt_bias, held, step.rows),
        lambda held: reference.mamba2_scan(xbc, dt, a_log, d, dt_bias, held, step.rows),
        state, step, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decodes_only", [False, True])
def test_delta_rule(decodes_only: bool, dtype: torch.dtype, device: torch.device) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED + decodes_only)
    torch.manual_seed(rng.randrange(1 << 30))
    step = draw_step(rng, device, [rng.randrange(33, 70), 1, rng.randrange(2, 20)], decodes_only=decodes_only)
    key_heads, key, value = rng.choice([1, 2]), rng.choice([9, 20]), rng.choice([12, 40])
    heads = key_heads * rng.choice([1, 2])
    qkv = torch.randn(step.tokens, 2 * key_heads * key + heads * value + 4, device=device).to(dtype)[:, :-4]
    a, b = torch.randn(step.tokens, 2 * heads + 1, device=device).to(dtype)[:, 1:].split(heads, dim=1)
    a_log, dt_bias = torch.randn(2, heads, device=device)
    state = resting((heads, key, value), step, torch.float32, device)
    compare(
        lambda held: triton_delta.gated_delta_rule(qkv, b, a, a_log, dt_bias, held, step.rows),
        lambda held: reference.gated_delta_rule(qkv, b, a, a_log, dt_bias, held, step.rows),
        state, step, dtype,
    )  # fmt: skip


def test_keys_that_are_alike_and_never_fade(device: torch.device) -> None:
    """One token again and again, believed wholly: what a series of powers of A in place of substitution blows up on."""
    rng = random.Random(SEED)
    step = draw_step(rng, device, [64, 50])
    heads, key, value = 1, 16, 16
    one = torch.randn(2 * key + value, device=device)
    qkv = one.expand(step.tokens, -1).contiguous()
    a, b = torch.full((2, step.tokens, heads), -30.0, device=device)
    b = -b
    a_log = dt_bias = torch.zeros(heads, device=device)
    state = resting((heads, key, value), step, torch.float32, device)
    compare(
        lambda held: triton_delta.gated_delta_rule(qkv, b, a, a_log, dt_bias, held, step.rows),
        lambda held: reference.gated_delta_rule(qkv, b, a, a_log, dt_bias, held, step.rows),
        state, step, torch.float32,
    )  # fmt: skip


def test_states_that_fade_at_once(device: torch.device) -> None:
    """Decays far below what fp32 holds are zeros, not the quotient of two."""
    rng = random.Random(SEED)
    step = draw_step(rng, device, [100])
    heads, head_dim, size = 2, 16, 16
    xbc = torch.randn(step.tokens, heads * head_dim + 2 * size, device=device)
    dt = torch.full((step.tokens, heads), 9.0, device=device)
    a_log, d, dt_bias = torch.full((heads,), 2.7, device=device), *torch.randn(2, heads, device=device)
    state = resting((heads, head_dim, size), step, torch.float32, device)
    compare(
        lambda held: triton_mamba2.mamba2_scan(xbc, dt, a_log, d, dt_bias, held, step.rows),
        lambda held: reference.mamba2_scan(xbc, dt, a_log, d, dt_bias, held, step.rows),
        state, step, torch.float32,
    )  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_sizes_of_published_models(dtype: torch.dtype, device: torch.device) -> None:
    """Nemotron-H's and Qwen3-Next's heads, a long prompt and a continued one beside decodes; few tokens where the
    interpreter runs them.
    """
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    on_gpu = device.type == "cuda"
    if not on_gpu and dtype is torch.float16:
        pytest.skip("the interpreter shows in one type what it would in the other")
    step = draw_step(rng, device, [900, 300] if on_gpu else [35, 3])
    sizes = ((128, 64, 128, 8), (128, 80, 128, 8), (16, 64, 256, 8), (256, 64, 256, 8))
    for heads, head_dim, size, groups in sizes if on_gpu else sizes[:1]:
        xbc = torch.randn(step.tokens, heads * head_dim + 2 * groups * size, device=device).to(dtype)
        dt = torch.randn(step.tokens, heads, device=device).to(dtype)
        a_log, d, dt_bias = torch.randn(3, heads, device=device)
        state = resting((heads, head_dim, size), step, torch.float32, device)
        expected_state = state.clone()
        got = triton_mamba2.mamba2_scan(xbc, dt, a_log, d, dt_bias, state, step.rows)
        expected = reference.mamba2_scan(xbc, dt, a_log, d, dt_bias, expected_state, step.rows)
        assert (got - expected).float().norm() < 1e-2 * expected.float().norm()
        apart = (state[step.used] - expected_state[step.used]).norm()
        assert apart < 1e-2 * expected_state[step.used].norm()
    heads, key_heads, key, value = 32, 16, 128, 128
    qkv = torch.randn(step.tokens, 2 * key_heads * key + heads * value, device=device).to(dtype)
    a, b = torch.randn(2, step.tokens, heads, device=device).to(dtype)
    a_log, dt_bias = torch.randn(2, heads, device=device)
    state = resting((heads, key, value), step, torch.float32, device)
    expected_state = state.clone()
    got = triton_delta.gated_delta_rule(qkv, b, a, a_log, dt_bias, state, step.rows)
    expected = reference.gated_delta_rule(qkv, b, a, a_log, dt_bias, expected_state, step.rows)
    assert (got - expected).float().norm() < 1e-2 * expected.float().norm()
    assert (state[step.used] - expected_state[step.used]).norm() < 1e-2 * expected_state[step.used].norm()
