"""The rule of tiles: whatever the shape, a plan has room for every routing, and what is compiled ahead covers it."""

from __future__ import annotations

import random

from stoker_kernels.launch import aot
from stoker_kernels.moe import tiles, triton_experts


def test_a_plan_has_room_for_any_routing() -> None:
    shuffled = random.Random(11)
    for _ in range(300):
        experts = shuffled.randint(1, 300)
        top_k = shuffled.randint(1, min(10, experts))
        tokens = shuffled.randint(1, 500)
        packed = shuffled.random() < 0.5
        tile = tiles.token_tile(tokens, top_k, experts, packed=packed)
        favourites = sorted(shuffled.sample(range(experts), max(top_k, experts // shuffled.randint(1, 20))))
        counts = [0] * experts
        for _ in range(tokens):
            for expert in shuffled.sample(favourites, top_k):
                counts[expert] += 1
        needed = sum(-(-count // tile) for count in counts)
        assert needed <= tiles.most_tiles(tokens, top_k, experts, packed=packed)
        fixed = tiles.fixed_sizes(tokens, top_k, experts)
        assert sum(-(-count // fixed.tile) for count in counts) <= fixed.most
        if tiles.in_one_program(tokens, top_k):
            assert max(counts) <= tile
            rows = tiles.route_tokens(tokens, top_k)
            assert tokens <= rows
            assert tiles.most_tiles(tokens, top_k, experts) <= tiles.most_in_one(rows, top_k, experts)


def test_every_tile_of_the_rule_is_compiled_ahead() -> None:
    ahead = {
        (
            each.spec.kernel.__name__,
            each.constants["KIND"],
            each.constants["TOKENS"],
            each.constants["ROWS"],
            *each.spec.options.values(),
        )
        for each in aot.variants(90)
        if each.spec.kernel.__name__ in ("gate_up_kernel", "down_kernel")
    }
    in_fp8 = (triton_experts.CHANNEL, triton_experts.BLOCKED)
    kinds = (triton_experts.DENSE, triton_experts.INT8, triton_experts.INT8_CHANNEL, *in_fp8)
    packed_kinds = (triton_experts.MXFP4, triton_experts.INT4, triton_experts.NVFP4)
    for name in ("gate_up_kernel", "down_kernel"):
        fixed = dict.fromkeys(kinds, tiles.FIXED_TILE) | dict.fromkeys(packed_kinds, tiles.FIXED_PACKED_TILE)
        for kind, shape in fixed.items():
            for tile in (each for each in tiles.TOKEN_TILES if each <= tiles.FIXED_TOKENS):
                assert (name, kind, tile, shape.rows, shape.warps, shape.stages) in ahead
    shuffled = random.Random(5)
    for _ in range(500):
        tile, rows = shuffled.choice(tiles.TOKEN_TILES), shuffled.randint(1, 20000)
        gated = shuffled.random() < 0.5
        name = "gate_up_kernel" if gated else "down_kernel"
        count, sms = shuffled.randint(1, 400), shuffled.choice((78, 108, 132))
        for kind, known in zip(packed_kinds, ("mxfp4", "int4", "nvfp4"), strict=True):
            packed = tiles.packed_row_tile(known, tile, count, rows, sms, gated=gated)
            assert (name, kind, tile, packed.rows, packed.warps, packed.stages) in ahead
        for kind in kinds:
            for as_fp8 in {False, kind in in_fp8}:
                in_bytes = kind == triton_experts.INT8
                shape = tiles.row_tile(tile, count, rows, sms, gated=gated, as_fp8=as_fp8, in_bytes=in_bytes)
                assert (name, kind, tile, shape.rows, shape.warps, shape.stages) in ahead


def test_few_tokens_still_use_every_sm() -> None:
    """One token of a model with eight experts of 768: more programs than SMs, in both products."""
    for rows, gated in ((768, True), (2048, False)):
        shape = tiles.row_tile(16, 8, rows, 132, gated=gated)
        assert 8 * -(-rows // shape.rows) >= 2 * 132
