"""RoPE and cache writes on a CPU against the reference: any shape, pages and slots in any order."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rounding import close

from stoker_kernels.launch import cc
from stoker_kernels.rope import compiled_rope, cpu_rope
from stoker_kernels.rope import reference as rope_reference

BF16 = torch.bfloat16
DTYPES = st.sampled_from([torch.float32, BF16])
LAX = settings(deadline=None, max_examples=60)


@LAX
@given(st.data())
def test_rope_and_cache_writes(data: st.DataObject) -> None:
    draw = data.draw
    tokens, kv_heads, group = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim = draw(st.sampled_from([10, 24, 64, 80, 112]))
    rotary = draw(st.integers(1, dim // 2)) * 2 if dim % 16 else draw(st.integers(0, dim // 32)) * 32
    page = draw(st.sampled_from([3, 16]))
    dtype, cache_dtype = draw(DTYPES), draw(st.sampled_from([torch.float32, BF16, torch.float8_e4m3fn]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    qkv = torch.randn(tokens, (group + 2) * kv_heads * dim, generator=generator).to(dtype)
    norms = [torch.randn(dim, generator=generator).to(dtype) if draw(st.booleans()) else None for _ in range(2)]
    scale = torch.rand(kv_heads, generator=generator) + 0.5 if cache_dtype == torch.float8_e4m3fn else None
    places = draw(st.permutations(range(-tokens, 5 * page)))[:tokens]
    mapping = torch.tensor([max(place, -1) for place in places])
    arguments: dict[str, Any] = {
        "num_q_heads": group * kv_heads, "num_kv_heads": kv_heads, "head_dim": dim,
        "q_norm": norms[0], "k_norm": norms[1], "interleaved": draw(st.booleans()), "k_scale": scale, "v_scale": scale,
    }  # fmt: skip
    positions = torch.randint(0, 50, (tokens,), generator=generator, dtype=torch.int32)
    table = torch.randn(50, rotary, generator=generator)
    results = []
    ways = [rope_reference.qk_norm_rope_kv_write, cpu_rope.qk_norm_rope_kv_write]
    if cc.refusal("cpu_rope") is None:
        ways.append(compiled_rope.qk_norm_rope_kv_write)
    for write in ways:
        caches = [torch.zeros(5, kv_heads, page, dim).to(cache_dtype) for _ in range(2)]
        results.append((write(qkv, positions, mapping, table, *caches, **arguments), *caches))
    for found in results[1:]:
        for mine, theirs in zip(found, results[0], strict=True):
            close(mine.float(), theirs.float(), parts=4 * 2.0**23 * torch.finfo(theirs.dtype).eps)
