"""The recurrences to compile ahead of time: the heads of published models.

Mamba-2 has heads of 64 or 80 with states of 128 or 256 (Nemotron-H), the delta rule keys and values of 128
(Qwen3-Next), convolutions four taps. Numbers of heads, groups and channels are arguments. Anything else is compiled
when its model starts.
Invariants: the arguments here are those the `triton_*.py` launch with.
Knows nothing of compiling.
"""

from __future__ import annotations

from typing import Any

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_ANYWHERE, I32_DIVISIBLE, register_aot
from stoker_kernels.recurrence import triton_conv, triton_delta, triton_mamba2, triton_settle, triton_try
from stoker_kernels.recurrence.types import DELTA_CHUNK

TAPS = 4
# (dimensions of a head, of a state)
MAMBA2 = ((64, 128), (80, 128), (64, 256))
DELTA_HEAD = 128
LEAST_SM = 80
_ROWS = dict.fromkeys(("slots", "query_start", "seq_lens"), I32_ANYWHERE)
# Of tokens that may be taken back.
_TRIED = {"slots": I32_ANYWHERE, "seq_lens": I32_ANYWHERE, "rows": I32, "steps": I32}
_SETTLED = {"slots": I32_ANYWHERE, "taken": I32_ANYWHERE, "rows": I32, "taken_stride": I32}
_STRIDES = dict.fromkeys(("layer_stride", "state_stride", "mixed_stride", "gate_stride"), I32_DIVISIBLE)


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def _register_conv(dtype: str) -> None:
    shapes = ((1, triton_conv.DECODE_BLOCK), (triton_conv.CHUNK_TOKENS, triton_conv.CHUNK_BLOCK))
    for bias in (True, False):
        data = _pointers(dtype, "x", "state", "weight", "y", *(("bias",) if bias else ()))
        register_aot(
            triton_conv.causal_conv_kernel,
            {**data, **_ROWS, "first_row": I32, "channels": I32, "x_stride": I32_DIVISIBLE,
             "state_stride": I32_DIVISIBLE},
            [{"WIDTH": TAPS, "KEPT": 4, "TOKENS": tokens, "BLOCK": block, **({} if bias else {"bias": None})}
             for tokens, block in shapes],
            options={"num_warps": triton_conv.WARPS},
            min_sm=LEAST_SM,
            compact=dtype == BF16 and bias,
        )  # fmt: skip


def _register_mamba2(dtype: str, head_dim: int, size: int) -> None:
    block = triton_mamba2.block_of(head_dim)
    signature = {
        **_pointers(dtype, "xbc", "dt", "y"), **_pointers(FP32, "a_log", "d", "dt_bias", "state"), **_ROWS,
        "heads": I32, "groups": I32,
        **dict.fromkeys(("head_dim", "size", "x_stride", "dt_stride", "state_stride"), I32_DIVISIBLE),
    }  # fmt: skip
    register_aot(
        triton_mamba2.mamba2_decode_kernel, signature, [{"BLOCK_P": block, "BLOCK_N": size}],
        options={"num_warps": triton_mamba2.DECODE_WARPS}, min_sm=LEAST_SM,
        compact=dtype == BF16 and (head_dim, size) == MAMBA2[0],
    )  # fmt: skip
    register_aot(
        triton_mamba2.mamba2_chunk_kernel, {**signature, "first_row": I32},
        [{"BLOCK_P": block, "BLOCK_N": size, "CHUNK": triton_mamba2.CHUNK, "PRECISION": "tf32"}],
        options={"num_warps": triton_mamba2.CHUNK_WARPS, "num_stages": triton_mamba2.CHUNK_STAGES}, min_sm=LEAST_SM,
        compact=False,  # the test of the folder compiles them
    )  # fmt: skip


def _register_delta(dtype: str, head: int) -> None:
    values = {"BLOCK_K": head, "BLOCK_V": triton_delta.VALUES}
    chunks = {"CHUNK": DELTA_CHUNK, "PRECISION": "tf32"}
    gates = {**_pointers(dtype, "qkv", "b", "a"), **_pointers(FP32, "a_log", "dt_bias")}
    counts = {
        **_ROWS, "heads": I32, "key_heads": I32,
        **dict.fromkeys(("key", "qkv_stride", "gate_stride"), I32_DIVISIBLE),
    }  # fmt: skip
    states = {"state": f"*{FP32}", "o": f"*{dtype}", "value": I32_DIVISIBLE, "state_stride": I32_DIVISIBLE}
    spec = {**gates, **counts, **states, "scale": FP32}
    solve = {name: kind for name, kind in {**gates, **counts}.items() if name != "slots"}
    scratch = {"inverse": f"*{FP32}", "first_row": I32}
    wide = {"num_warps": triton_delta.CHUNK_WARPS, "num_stages": triton_delta.CHUNK_STAGES}
    # The test of the folder compiles those of chunks.
    for kernel, signature, constants, options in (
        (triton_delta.delta_decode_kernel, spec, values, {"num_warps": triton_delta.DECODE_WARPS}),
        (triton_delta.delta_solve_kernel, solve | scratch, {"BLOCK_K": head, **chunks}, wide),
        (triton_delta.delta_chunk_kernel, spec | scratch, {**values, **chunks}, wide),
    ):
        compact = dtype == BF16 and options is not wide
        register_aot(kernel, signature, [constants], options=options, min_sm=LEAST_SM, compact=compact)


def _register_drafts(dtype: str) -> None:
    windows = _pointers(dtype, "state", "inputs")
    try_conv = _pointers(dtype, "x", "weight", "mixed") | windows | _TRIED
    strides = {"x_stride": I32_DIVISIBLE, "state_stride": I32_DIVISIBLE}
    for bias in (True, False):
        register_aot(
            triton_try.try_conv_kernel,
            {**try_conv, "channels": I32, **strides, **({"bias": f"*{dtype}"} if bias else {})},
            [{"WIDTH": TAPS, "BLOCK": triton_try.CHANNELS, **({} if bias else {"bias": None})}],
            options={"num_warps": triton_try.WARPS}, min_sm=LEAST_SM, compact=dtype == BF16 and bias,
        )  # fmt: skip
    moved = dict.fromkeys(("layer_stride", "state_stride", "input_stride"), I32_DIVISIBLE)
    register_aot(
        triton_settle.settle_conv_kernel, {**windows, **_SETTLED, "channels": I32, **moved},
        [{"KEPT": TAPS - 1, "LINES": TAPS, "BLOCK": triton_try.CHANNELS}],
        options={"num_warps": triton_try.WARPS}, min_sm=LEAST_SM, compact=dtype == BF16,
    )  # fmt: skip
    for head_dim, size in MAMBA2:
        blocks = [{"BLOCK_P": triton_mamba2.block_of(head_dim), "BLOCK_N": size}]
        sizes = {"heads": I32, "groups": I32, "head_dim": I32_DIVISIBLE, "size": I32_DIVISIBLE}
        _register_tries(
            dtype, (triton_try.try_mamba2_kernel, triton_settle.settle_mamba2_kernel), ("xbc", "dt", "y"),
            ("a_log", "d", "dt_bias"), sizes, ("x_stride", "dt_stride"), blocks, compact=(head_dim, size) == MAMBA2[0],
        )  # fmt: skip
    sizes = {"heads": I32, "key_heads": I32, "key": I32_DIVISIBLE, "value": I32_DIVISIBLE}
    _register_tries(
        dtype, (triton_try.try_delta_kernel, triton_settle.settle_delta_kernel), ("qkv", "b", "a", "o"),
        ("a_log", "dt_bias"), sizes, ("qkv_stride", "gate_stride"),
        [{"BLOCK_K": DELTA_HEAD, "BLOCK_V": triton_delta.VALUES}], compact=True,
    )  # fmt: skip


def _register_tries(
    dtype: str, kernels: tuple[Any, Any], data: tuple[str, ...], exact: tuple[str, ...], sizes: dict[str, str],
    strides: tuple[str, str], blocks: list[dict[str, Any]], *, compact: bool,
) -> None:  # fmt: skip
    """Trying and settling of one recurrence."""
    rests = _pointers(FP32, "state", "gates")
    scale = {"scale": FP32} if "qkv" in data else {}
    tried = {**_pointers(dtype, *data), **_pointers(FP32, *exact), **rests, **_TRIED, **sizes, **scale}
    tried |= dict.fromkeys((*strides, "state_stride"), I32_DIVISIBLE)
    settled = {**rests, **_pointers(dtype, "mixed"), **_SETTLED, **sizes, **_STRIDES, "channels": I32_DIVISIBLE}
    for kernel, signature in zip(kernels, (tried, settled), strict=True):
        register_aot(
            kernel, signature, blocks, options={"num_warps": triton_try.WARPS}, min_sm=LEAST_SM,
            compact=compact and dtype == BF16,
        )  # fmt: skip


for _dtype in (BF16, FP16):
    _register_conv(_dtype)
    _register_drafts(_dtype)
    for _head_dim, _size in MAMBA2:
        _register_mamba2(_dtype, _head_dim, _size)
    _register_delta(_dtype, DELTA_HEAD)
