"""The references against independent definitions: torch's own functions, complex rotation, and fp8 by hand."""

from __future__ import annotations

import math

import pytest
import torch

from stoker_kernels.activation import op as activation
from stoker_kernels.embedding import op as embedding
from stoker_kernels.norm import op as norm
from stoker_kernels.rope import op as rope

TOKENS, HEADS, KV_HEADS, DIM, PAGE = 5, 4, 2, 16, 8


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(3, 40), torch.rand(40)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (40,), weight, 1e-5))


def test_add_rms_norm_keeps_the_sum() -> None:
    x, residual, weight = torch.randn(3, 40).bfloat16(), torch.randn(3, 40).bfloat16(), torch.ones(40).bfloat16()
    expected_sum = x + residual
    got = norm.add_rms_norm(x, residual, weight, 1e-5, out=x)
    assert got is x
    assert torch.equal(residual, expected_sum)
    assert torch.equal(got, norm.rms_norm(expected_sum, weight, 1e-5))


@pytest.mark.parametrize("zero_row", [False, True])
def test_quantized_values_come_back(zero_row: bool) -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    if zero_row:
        x[1], residual[1] = 0, 0
    quantized = norm.add_rms_norm_quant(x, residual.clone(), weight, 1e-5)
    expected = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert quantized.data.dtype == torch.float8_e4m3fn
    assert quantized.scale.shape == (3, 1)
    # e4m3 has 3 mantissa bits: half a unit is 1/16; its least step is 2^-9 of the scale.
    error = (quantized.data.float() * quantized.scale - expected).abs()
    assert (error <= expected.abs() / 16 + quantized.scale * 2**-10 + 1e-9).all()
    assert quantized.data[0].float().abs().max() == 448


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("silu_and_mul", torch.nn.SiLU()),
        ("gelu_and_mul", torch.nn.GELU()),
        ("gelu_tanh_and_mul", torch.nn.GELU(approximate="tanh")),
    ],
)
def test_activations_are_gate_first(name: str, act: torch.nn.Module) -> None:
    x = torch.randn(3, 20)
    torch.testing.assert_close(getattr(activation, name)(x), act(x[:, :10]) * x[:, 10:])


def test_embed_copies_rows() -> None:
    table = torch.randn(7, 4)
    assert torch.equal(embedding.embed(torch.tensor([6, 0], dtype=torch.int32), table), table[[6, 0]])


def _angles(positions: torch.Tensor, rot: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rot, 2) / rot)
    return positions[:, None] * frequencies[None, :]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [DIM, DIM // 2])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_is_a_complex_rotation(normed: bool, rot: int, interleaved: bool) -> None:
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM)
    positions = torch.tensor([0, 1, 7, 30, 3], dtype=torch.int32)
    slots = torch.tensor([9, -1, 0, 23, 8])
    table = torch.cat([f(_angles(torch.arange(40), rot)) for f in (torch.cos, torch.sin)], dim=1)
    k_cache, v_cache = torch.full((2, 3, KV_HEADS, PAGE, DIM), -5.0).unbind(0)
    weights = {"q_norm": torch.rand(DIM), "k_norm": torch.rand(DIM)} if normed else {}
    q = rope.qk_norm_rope_kv_write(
        qkv, positions, slots, table, k_cache, v_cache, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        interleaved=interleaved, **weights,
    )  # fmt: skip

    heads = qkv.view(TOKENS, -1, DIM)
    turn = torch.polar(torch.ones(TOKENS, rot // 2), _angles(positions, rot).float())

    def expected(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6)
        result = x.clone()
        halves = (slice(0, rot, 2), slice(1, rot, 2)) if interleaved else (slice(0, rot // 2), slice(rot // 2, rot))
        turned = torch.complex(x[..., halves[0]], x[..., halves[1]]) * turn[:, None]
        result[..., halves[0]], result[..., halves[1]] = turned.real, turned.imag
        return result

    torch.testing.assert_close(q, expected(heads[:, :HEADS], weights.get("q_norm")), rtol=1e-4, atol=1e-5)
    keys = expected(heads[:, HEADS : HEADS + KV_HEADS], weights.get("k_norm"))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, PAGE)
            torch.testing.assert_close(k_cache[page, :, offset], keys[token], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(v_cache[page, :, offset], heads[token, HEADS + KV_HEADS :])
    written = int((k_cache != -5.0).any(-1).any(1).sum())
    assert written == 4


def test_an_fp8_cache_is_scaled_and_saturates() -> None:
    qkv = torch.randn(1, 3 * DIM)
    qkv[0, 2 * DIM] = 1e6
    table = torch.tensor([[1.0] * (DIM // 2) + [0.0] * (DIM // 2)])
    k_cache, v_cache = (torch.zeros(1, 1, PAGE, DIM).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.tensor([0.25])
    rope.qk_norm_rope_kv_write(
        qkv, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), table, k_cache, v_cache,
        num_q_heads=1, num_kv_heads=1, head_dim=DIM, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    torch.testing.assert_close(k_cache[0, 0, 0].float() * 0.25, qkv[0, DIM : 2 * DIM], rtol=1 / 15, atol=2**-11)
    assert v_cache[0, 0, 0, 0].float() == 448
    assert math.isfinite(v_cache.float().sum())
