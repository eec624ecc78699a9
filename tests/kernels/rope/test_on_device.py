"""The fused QK-norm, RoPE and KV-write kernel against its reference, at every variant it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker_kernels import rope
from stoker_kernels.rope import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn


def _case(
    device: torch.device,
    *,
    tokens: int = 3,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    rot: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    norm: bool = True,
    interleaved: bool = False,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(tokens * head_dim + rot)
    q_heads, kv_heads = heads
    pages = tokens // page_size + 3

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    if tokens > 1:
        slots[tokens // 2] = -1
    cache_dtype = cache_dtype or dtype
    # Scales small enough that some values saturate.
    scales = {"k_scale": 0.003 * (1 + draw(kv_heads).abs()), "v_scale": 0.004 * (1 + draw(kv_heads).abs())}
    arguments = (
        draw(tokens, (q_heads + 2 * kv_heads) * head_dim).to(dtype),
        torch.randint(200, (tokens,), generator=generator, dtype=torch.int32).to(device),
        slots.to(device),
        draw(200, rot),
        torch.full((pages, kv_heads, page_size, head_dim), 7.0, device=device).to(cache_dtype),
        torch.full((pages, kv_heads, page_size, head_dim), 7.0, device=device).to(cache_dtype),
    )
    options: dict[str, Any] = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    options |= {"interleaved": interleaved, "eps": 1e-6}
    if norm:
        options |= {"q_norm": draw(head_dim).to(dtype), "k_norm": draw(head_dim).to(dtype)}
    return arguments, options | (scales if cache_dtype == FP8 else {})


def _compare(device: torch.device, **case: Any) -> None:
    arguments, options = _case(device, **case)
    mine, theirs = ([argument.clone() for argument in arguments] for _ in range(2))
    got = rope.qk_norm_rope_kv_write(*mine, **options)
    expected = reference.qk_norm_rope_kv_write(*theirs, **options)
    tolerance = TOLERANCE[arguments[0].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for cache, expected_cache in zip(mine[4:], theirs[4:], strict=True):
        assert not cache.float().isnan().any()
        if cache.dtype == FP8:
            tolerance = 0.126
            assert (cache.float() == expected_cache.float()).float().mean().item() > 0.99
        torch.testing.assert_close(cache.float(), expected_cache.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.matrix(take=12)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [64, 32, 48, 62])
def test_styles_match(rot: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    _compare(device, rot=rot, interleaved=interleaved, dtype=dtype)


@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3)])
@pytest.mark.parametrize("norm", [False, True])
def test_shapes_match(head_dim: int, heads: tuple[int, int], norm: bool, device: torch.device) -> None:
    _compare(device, head_dim=head_dim, rot=head_dim, heads=heads, norm=norm, tokens=1)


@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pages_of_one_token_match(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare(device, head_dim=head_dim, rot=head_dim, heads=(2, 2), page_size=1, tokens=9, dtype=dtype, norm=False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (80, 32), (64, 0)])
@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_for_each_head_matches(
    centred: bool, head_dim: int, rot: int, interleaved: bool, device: torch.device
) -> None:
    arguments, options = _case(device, head_dim=head_dim, rot=rot, interleaved=interleaved)
    generator = torch.Generator().manual_seed(3)
    options |= {"centred": centred, "q_norm": torch.randn(4, head_dim, generator=generator).to(device)}
    options["k_norm"] = torch.randn(2, head_dim, generator=generator).to(device)
    caches = [argument.clone() for argument in arguments[4:]]
    expected = reference.qk_norm_rope_kv_write(*arguments[:4], *caches, **options)
    torch.testing.assert_close(rope.qk_norm_rope_kv_write(*arguments, **options), expected, rtol=1e-5, atol=1e-5)
    for cache, filled in zip(arguments[4:], caches, strict=True):
        torch.testing.assert_close(cache, filled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_heads_that_do_not_rotate(head_dim: int, norm: bool, device: torch.device) -> None:
    _compare(device, head_dim=head_dim, rot=0, norm=norm)


@pytest.mark.parametrize("cache_dtype", [FP8, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [16, 128])
def test_cache_types_match(cache_dtype: torch.dtype, page_size: int, device: torch.device) -> None:
    _compare(device, cache_dtype=cache_dtype, page_size=page_size, tokens=5)


@pytest.mark.parametrize("tokens", [65, 1025])
def test_larger_cuts_match(tokens: int, device: torch.device) -> None:
    _compare(device, tokens=tokens, heads=(1, 1), head_dim=16, rot=8)


def test_one_norm_alone(device: torch.device) -> None:
    for missing in ("q_norm", "k_norm"):
        arguments, options = _case(device)
        options[missing] = None
        expected = reference.qk_norm_rope_kv_write(*(a.clone() for a in arguments), **options)
        torch.testing.assert_close(rope.qk_norm_rope_kv_write(*arguments, **options), expected)


def test_pages_of_one_arena(device: torch.device) -> None:
    arguments, options = _case(device)
    arena = torch.zeros(2, *arguments[4].shape, device=device).transpose(0, 1)
    caches = (arena[:, 0], arena[:, 1])
    expected = reference.qk_norm_rope_kv_write(*arguments[:4], *(c.clone() for c in caches), **options)
    plain = [torch.zeros_like(arguments[4]) for _ in range(2)]
    reference.qk_norm_rope_kv_write(*arguments[:4], *plain, **options)
    got = rope.qk_norm_rope_kv_write(*arguments[:4], *caches, **options)
    torch.testing.assert_close(got, expected)
    for cache, filled in zip(caches, plain, strict=True):
        torch.testing.assert_close(cache, filled)


def test_caches_of_another_layout_are_refused(device: torch.device) -> None:
    arguments, options = _case(device)
    turned = arguments[4].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        rope.qk_norm_rope_kv_write(*arguments[:4], turned, turned, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [FP8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 511, 8192])
@pytest.mark.parametrize("heads", [(28, 4), (16, 8)])
def test_real_sizes_match(tokens: int, heads: tuple[int, int], cache_dtype: torch.dtype, device: torch.device) -> None:
    _compare(
        device,
        tokens=tokens,
        heads=heads,
        head_dim=128,
        rot=128,
        page_size=64,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )
