"""What of the mixture-of-experts kernels is compiled ahead: by the ways that published models choose, and by tile.

Invariants: the rules of `tiles` give no other tiles than the tables list. What stands here for no model, such as other
numbers of choices or of experts, is compiled at its first start.
Knows nothing of compiling.
"""

from __future__ import annotations

from stoker_kernels.launch.aot_registry import BF16, FP32, I32, I32_DIVISIBLE, I64, register_aot
from stoker_kernels.moe import triton_experts, triton_keep, triton_route
from stoker_kernels.moe.tiles import (
    BYTES_TILE,
    FIXED_PACKED_TILE,
    FIXED_TILE,
    LARGEST_PACKED_TILE,
    PACKED_TILES,
    ROUTE_TOKENS,
    SOME_TOKENS,
    SORT_BLOCKS,
    TOKEN_TILES,
    RowTile,
    in_one_program,
    most_in_one,
    power_of_two,
)

# Experts, choices, renormalized, scoring, groups and best groups of published models, as in their configs.
SOFTMAX, SIGMOID, SPARSEMIXER = (triton_route.SCORINGS[name] for name in ("softmax", "sigmoid", "sparsemixer"))
PUBLISHED = (
    (128, 8, True, SOFTMAX, 1, 1),  # Qwen3-30B-A3B, -235B-A22B
    (60, 4, False, SOFTMAX, 1, 1),  # Qwen1.5-MoE-A2.7B
    (64, 8, False, SOFTMAX, 1, 1),  # Qwen2-57B-A14B, OLMoE
    (8, 2, True, SOFTMAX, 1, 1),  # Mixtral
    (32, 8, True, SOFTMAX, 1, 1),  # Granite 3 1B-A400M
    (40, 8, True, SOFTMAX, 1, 1),  # Granite 3 3B-A800M
    (32, 4, True, SOFTMAX, 1, 1),  # gpt-oss-20b
    (128, 4, True, SOFTMAX, 1, 1),  # gpt-oss-120b
    (128, 8, True, SIGMOID, 1, 1),  # GLM-4.5-Air
    (160, 8, True, SIGMOID, 1, 1),  # GLM-4.5
    (64, 6, False, SOFTMAX, 1, 1),  # DeepSeek-V2-Lite
    (256, 8, True, SIGMOID, 8, 4),  # DeepSeek-V3
    (512, 10, True, SOFTMAX, 1, 1),  # Qwen3-Next-80B-A3B
    (256, 8, True, SOFTMAX, 1, 1),  # Qwen3.5-35B-A3B
    (72, 10, True, SOFTMAX, 1, 1),  # Granite-4.0-h-small
    (128, 6, True, SIGMOID, 1, 1),  # Nemotron-3-Nano-30B-A3B
    (16, 2, False, SPARSEMIXER, 1, 1),  # Phi-3.5-MoE
    (256, 8, True, SIGMOID, 1, 1),  # MiniMax-M2
    (64, 4, True, SIGMOID, 1, 1),  # GLM-4.7-Flash
)
# Those whose softmax a bias corrects, as it does every sigmoid.
CORRECTED = (
    (64, 6, True, SOFTMAX, 1, 1),  # ERNIE 4.5 21B-A3B
    (64, 8, True, SOFTMAX, 1, 1),  # ERNIE 4.5 300B-A47B
)
_TILE_CHOICES = {
    16: (RowTile(32, 128, 4, 4), RowTile(16, 128, 4, 4), FIXED_TILE),
    32: (RowTile(32, 128, 4, 4), RowTile(16, 128, 4, 4), FIXED_TILE),
    64: (FIXED_TILE,),
    128: (RowTile(128, 64, 8, 3),),
}
_DOWN_CHOICES = _TILE_CHOICES | {
    tile: (RowTile(64, 128, 4, 4), RowTile(32, 128, 4, 4), RowTile(16, 128, 4, 4), FIXED_TILE) for tile in (16, 32)
}

# Of FP8 where the GPU multiplies it as it is.
_FP8_CHOICES: dict[int, tuple[RowTile, ...]] = {16: (RowTile(64, 128, 4, 5),), 32: (RowTile(64, 128, 4, 5),)}

# Of integers in bytes where an expert's rows are enough for all SMs.
_BYTES_CHOICES: dict[int, tuple[RowTile, ...]] = {16: (BYTES_TILE,), 32: (BYTES_TILE,)}


def _packed_choices(kind: str, *, gated: bool) -> dict[int, tuple[RowTile, ...]]:
    """Of weights in four bits, by whether gate and up are multiplied together."""
    rest = {16: RowTile(32, 256, 2, 4 if gated else 6), 32: RowTile(16, 256, 1, 4), 64: FIXED_PACKED_TILE}
    found = {
        tile: tuple(dict.fromkeys((of_both[0 if gated else 1], rest[tile], FIXED_PACKED_TILE)))
        for tile, of_both in PACKED_TILES[kind].items()
    }
    return found | {TOKEN_TILES[-1]: (LARGEST_PACKED_TILE,)}


BLOCKS, PACKED, INTEGERS, NVFP4, BYTES, BOTH = 2, 3, 4, 5, 6, 7
# Code places of a step that share a group of 32, 64 and 128 columns.
TOGETHER = (1, 2, 4)


def _register_routes() -> None:
    seen = set()
    ways_to_choose = [*((way, way[3] == SIGMOID) for way in PUBLISHED), *((way, True) for way in CORRECTED)]
    for (experts, top_k, renormalize, scoring, groups, top_groups), corrected in ways_to_choose:
        width, choices = power_of_two(experts), power_of_two(top_k)
        ways = [(SOME_TOKENS, False, 1)]
        for tokens in ROUTE_TOKENS:
            if in_one_program(tokens, top_k):
                ways.append((tokens, True, most_in_one(tokens, top_k, experts)))
        for tokens, alone, tiles in ways:
            constants = {
                "TOKENS": tokens, "EXPERTS": width, "TOP_K": top_k, "CHOICES": choices, "SCORING": scoring,
                "RENORMALIZE": renormalize, "GROUPS": groups, "TOP_GROUPS": top_groups,
                "TOP2": scoring == SIGMOID and groups > 1, "ALL": alone, "TILES": tiles,
            } | ({} if corrected else {"bias": None}) | ({} if alone else {"counts": None})  # fmt: skip
            key = tuple(sorted((name, str(value)) for name, value in constants.items()))
            if key in seen:
                continue
            seen.add(key)
            types = dict.fromkeys(("ids", "order", "tiles", "counts"), f"*{I32}")
            types |= {"logits": f"*{BF16}", "bias": f"*{FP32}", "slots": "*i64", "weights": f"*{FP32}"}
            types |= dict.fromkeys(("tokens", "num_experts", "logits_stride", "group_size", "most"), I32)
            register_aot(
                triton_route.route_kernel, types | {"scale": FP32, "jitter": FP32}, [constants],
                options={"num_warps": tokens}, min_sm=80, compact=experts == 8 and not alone,
            )  # fmt: skip


def _register_sort() -> None:
    types = dict.fromkeys(("ids", "order", "tiles", "counts"), f"*{I32}") | {"pairs": I32, "most": I32}
    register_aot(
        triton_route.sort_kernel, types,
        [{"TILE": tile, "BLOCK": block} for tile in TOKEN_TILES for block in SORT_BLOCKS],
        options={"num_warps": triton_route.SORT_WARPS}, min_sm=80,
    )  # fmt: skip


def _register_keep() -> None:
    types = dict.fromkeys(("ids", "tiles", "kept_ids", "kept_tiles"), f"*{I32}")
    types |= dict.fromkeys(("pairs", "most", "first", "count"), I32)
    register_aot(
        triton_keep.keep_kernel, types, [{"BLOCK": triton_keep.BLOCK}], options={"num_warps": triton_keep.WARPS},
        min_sm=80,
    )  # fmt: skip


def _register_products() -> None:
    plan = {"order": f"*{I32}", "tiles": f"*{I32}"}
    for kind, (weight, min_sm) in enumerate(((BF16, 80), ("fp8e4nv", 89), ("fp8e4nv", 89))):
        types = plan | {"x": f"*{weight}", "weight": f"*{weight}", "x_scale": f"*{FP32}", "scale": f"*{FP32}"}
        unscaled: dict[str, object] = {"x_scale": None, "scale": None} if kind == 0 else {}
        for biased in (False, True) if kind == 0 else (False,):
            bias: dict[str, object] = {"group": None, "factor": None}
            if not biased:
                bias["bias"] = None
            for gated, table in ((True, _TILE_CHOICES), (False, _DOWN_CHOICES)):
                _register_product(gated, table, kind, min_sm, types, unscaled | bias)
                if kind > 0:
                    _register_product(gated, _FP8_CHOICES, kind, 90, types, bias, max_sm=90)
        if kind < BLOCKS:
            alone: dict[str, object] = {"group": None, "factor": None, "bias": None, "PARTS": 1}
            _register_product(True, _DOWN_CHOICES, kind, min_sm, types, unscaled | alone)
            if kind > 0:
                _register_product(True, _FP8_CHOICES, kind, 90, types, alone, max_sm=90)
    packed: dict[str, str] = plan | {"x": f"*{BF16}", "weight": f"*{I32}", "scale": f"*{I64}"}
    factored = packed | {"factor": f"*{FP32}"}
    floats: dict[str, object] = {"x_scale": None, "group": None, "bias": None}
    for gated in (True, False):
        table = _packed_choices("mxfp4", gated=gated)
        # A rank that is not the first leaves the bias of down to it.
        for biased in (True,) if gated else (True, False):
            absent: dict[str, object] = {"x_scale": None, "group": None, "factor": None}
            if not biased:
                absent["bias"] = None
            _register_product(gated, table, PACKED, 80, packed, absent)
        _register_product(gated, _packed_choices("nvfp4", gated=gated), NVFP4, 80, factored, floats)
    _register_product(True, _packed_choices("nvfp4", gated=False), NVFP4, 80, factored, floats | {"PARTS": 1})
    integers = plan | {"x": f"*{BF16}", "weight": f"*{I32}", "scale": f"*{I32}", "group": I32_DIVISIBLE}
    for gated in (True, False):
        table = _packed_choices("int4", gated=gated)
        for together in TOGETHER:
            shared: dict[str, object] = {"x_scale": None, "bias": None, "factor": None, "TOGETHER": together}
            _register_product(gated, table, INTEGERS, 80, integers, shared)
    # In bytes: groups of 128 columns and more, or whole rows.
    bytes_ = integers | {"weight": "*u8"}
    for gated, table in ((True, _TILE_CHOICES), (False, _DOWN_CHOICES)):
        for tiles in (table, _BYTES_CHOICES) if gated else (table,):
            _register_product(gated, tiles, BYTES, 80, bytes_, {"x_scale": None, "bias": None, "factor": None})
    both = plan | {"x": "*i8", "weight": "*i8", "x_scale": f"*{FP32}", "scale": f"*{FP32}"}
    for gated, table in ((True, _TILE_CHOICES), (False, _DOWN_CHOICES)):
        _register_product(gated, table, BOTH, 80, both, {"group": None, "factor": None, "bias": None})


def _register_product(
    gate_up: bool, table: dict[int, tuple[RowTile, ...]], kind: int, min_sm: int, types: dict[str, str],
    constants: dict[str, object], max_sm: int = 999,
) -> None:  # fmt: skip
    types = types | {"out": f"*{BF16}", "bias": f"*{BF16}", "ffn": I32_DIVISIBLE, "hidden": I32_DIVISIBLE}
    biased = "bias" not in constants
    constants = {"TOGETHER": 1} | constants
    if gate_up:
        types |= {"x_stride": I32_DIVISIBLE, "top_k": I32, "limit": FP32, "slope": FP32}
        constants = {"CLAMPED": biased, "PARTS": 2} | constants
    for tokens, shapes in table.items():
        for shape in shapes:
            columns = shape.columns if kind in (0, PACKED, INTEGERS, NVFP4, BYTES) else 128
            register_aot(
                triton_experts.gate_up_kernel if gate_up else triton_experts.down_kernel, types,
                [constants | {"TOKENS": tokens, "ROWS": shape.rows, "K": columns, "KIND": kind, "WIDEN": False}],
                options={"num_warps": shape.warps, "num_stages": shape.stages}, min_sm=min_sm, max_sm=max_sm,
                compact=tokens == (16 if gate_up else 128) and kind == 0 and not biased and shape is shapes[0]
                and constants.get("PARTS") != 1,
            )  # fmt: skip


def _register_sums() -> None:
    for top_k in sorted({each[1] for each in PUBLISHED}):
        for beside in ({"shared": None, "shared_gate": None}, {"shared_gate": None}, {}):
            types = dict.fromkeys(("rows", "out", "shared", "shared_gate"), f"*{BF16}")
            types |= {"ids": f"*{I32}", "weights": f"*{FP32}", "hidden": I32_DIVISIBLE, "shared_stride": I32_DIVISIBLE}
            register_aot(
                triton_experts.sum_kernel, types, [beside | {"TOP_K": top_k, "BLOCK": triton_experts.SUM_COLUMNS}],
                options={"num_warps": triton_experts.SUM_WARPS}, min_sm=80, compact=top_k == 8 and not beside,
            )  # fmt: skip


_register_routes()
_register_sort()
_register_keep()
_register_products()
_register_sums()
