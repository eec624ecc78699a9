"""The reference of RoPE against complex rotation, and of the write of k and v."""

from __future__ import annotations

import math

import pytest
import torch

from stoker_kernels import rope

TOKENS, HEADS, KV_HEADS, DIM, PAGE = 5, 4, 2, 16, 8


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
