"""Experts for few tokens on Hopper, where the bytes of those chosen are the limit: host side of csrc/sm90_few_experts.

Two launches: gate-up with its activation, and down with the weighted sum; activations of experts in FP8 are quantized
inside. Rows are dealt to the SMs by number, whatever the routing is.
Invariants: a launch never synchronises and can be captured after one launch of its kind; a token's bits depend on its
own row and choices alone.
Does not know: how experts were chosen, nor for how many tokens other kernels are faster (`choose`).
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_count, sm_of
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.moe.types import CLAMPED_SLOPE, ExpertActivation, ExpertKind, ExpertWeights, Routes

STEM, ARCH = "sm90_few_experts", "sm_90a"
THREADS = 256
MOST_TOKENS = 16  # of one tile of a plan
_GATE_ROWS, _DOWN_ROWS = 8, 16  # of a stage: of gate and of up each, and of down at most
_BOX_COLUMNS = {"dense": 64, "fp8_channel": 128, "fp8_block": 128}
_BOXES = 2  # of 128 bytes a row in a stage
_RING, _BARRIERS, _PITCH = 65_536, 256, 20
_SHARED_LIMIT = 232_448  # bytes of shared memory that one CTA of sm_90 may have


class FewArguments(ctypes.Structure):
    """FewArguments of csrc/sm90_few_experts.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "scale", "bias", "order", "tiles", "ids", "weights")),
        *((name, ctypes.c_void_p) for name in ("shared", "shared_gate")),
        *((name, ctypes.c_float) for name in ("limit", "slope")),
        *((name, ctypes.c_int) for name in ("clamped", "tokens", "top_k", "num_tiles", "rows", "columns", "tile_rows")),
        *((name, ctypes.c_int) for name in ("row_tiles", "chunks", "boxes", "ld_x", "ld_shared")),
    ]


def shared_bytes(tokens: int, top_k: int, columns: int, kind: ExpertKind, *, gated: bool) -> int:
    """Dynamic shared memory: the ring on a multiple of 1024 bytes, barriers, the plan, rows of x, sums of tokens."""
    pairs, chunks = tokens * top_k, -(-_boxes(columns, kind) // _BOXES)
    x_rows, sums = (tokens, 2 * tokens) if gated else (pairs, pairs)
    plan = 16 * pairs + 16 * -(-pairs // 4) + 16 * -(-x_rows // 4)
    rows = x_rows * (chunks * _BOXES * _BOX_COLUMNS[kind] * 2 + 16)
    return 1024 + _RING + _BARRIERS + plan + rows + sums * chunks * _PITCH * 4


def _boxes(columns: int, kind: ExpertKind) -> int:
    return -(-columns // _BOX_COLUMNS[kind])


def down_rows(hidden: int, sms: int) -> int:
    """Rows of down in a stage, an even number: as many that every SM takes equally many stages, as far as that goes."""
    rounds = -(-hidden // (_DOWN_ROWS * sms))
    return 2 * -(-hidden // (2 * rounds * sms))


def refusal(x: Tensor, routes: Routes, weights: ExpertWeights, shared: Tensor | None) -> str | None:
    """None where the kernels take these operands, else why not."""
    tokens, top_k = routes.ids.shape
    if weights.in_four_bits or weights.in_integers or weights.takes_int8 or not chip_of(sm_of(x.device)).wgmma:
        return "takes experts in 16 bits or FP8, on sm_90"
    if not weights.gated:
        return "takes experts with a gate"
    floats = {x.dtype, *(each.dtype for each in (weights.gate_up_bias, weights.down_bias, shared) if each is not None)}
    if floats != {torch.bfloat16} or (weights.kind == "dense" and weights.down.dtype != torch.bfloat16):
        return f"takes bfloat16 throughout, not {sorted(map(str, floats))}"
    matrices = (weights.gate_up, weights.down)
    if weights.ffn % 8 or any(each.shape[2] * each.element_size() % 16 for each in matrices):
        return f"rows of {weights.ffn} and {weights.hidden} numbers do not start on multiples of 16 bytes"
    if routes.plan is None or not 0 < tokens <= MOST_TOKENS:
        return f"{tokens} tokens are not 1 to {MOST_TOKENS} with a plan"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or (shared is not None and shared.stride(1) != 1):
        return "rows have to be contiguous and start on multiples of 16 bytes"
    room = max(
        shared_bytes(tokens, top_k, weights.hidden, weights.kind, gated=True),
        shared_bytes(tokens, top_k, weights.ffn, weights.kind, gated=False),
    )
    if room > _SHARED_LIMIT:
        return f"{tokens} tokens of {top_k} experts of width {weights.ffn} need {room} bytes of shared memory"
    return cuda.missing_cubin(STEM, ARCH)


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    out: Tensor,
    *,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """`moe.experts` for operands that `refusal` accepts, into `out` [T, H], contiguous. Raises CubinMissing."""
    tokens, top_k = routes.ids.shape
    ffn, hidden, device = weights.ffn, weights.hidden, x.device
    inner = torch.empty((tokens * top_k, ffn), dtype=x.dtype, device=device)
    clamped = activation == "clamped"
    sizes = (ffn, hidden, _GATE_ROWS, _boxes(hidden, weights.kind))
    gate_up = _arguments(inner, x, routes, weights.gate_up_scale, weights.gate_up_bias, sizes)
    gate_up.limit, gate_up.clamped, gate_up.slope = limit, int(clamped), CLAMPED_SLOPE if clamped else 1.0
    _launch(weights, gate_up, device, gated=True)
    sizes = (hidden, ffn, down_rows(hidden, sm_count(device)), _boxes(ffn, weights.kind))
    down = _arguments(out, inner, routes, weights.down_scale, weights.down_bias, sizes)
    down.shared, down.shared_gate = cuda.address_of(shared), cuda.address_of(shared_gate)
    down.ld_shared = 0 if shared is None else shared.stride(0)
    _launch(weights, down, device, gated=False)
    return out


def _arguments(
    out: Tensor, x: Tensor, routes: Routes, scale: Tensor | None, bias: Tensor | None, sizes: tuple[int, int, int, int]
) -> FewArguments:
    """`sizes`: rows and columns of an expert, rows of a stage, boxes of a row."""
    assert routes.plan is not None
    tokens, top_k = routes.ids.shape
    rows, columns, tile_rows, boxes = sizes
    return FewArguments(
        out.data_ptr(), x.data_ptr(), cuda.address_of(scale), cuda.address_of(bias), routes.plan.order.data_ptr(),
        routes.plan.tiles.data_ptr(), routes.ids.data_ptr(), routes.weights.data_ptr(), 0, 0, 0.0, 1.0, 0,
        tokens, top_k, routes.plan.tiles.shape[0], rows, columns, tile_rows, -(-rows // tile_rows),
        -(-boxes // _BOXES), boxes, x.stride(0), 0,
    )  # fmt: skip


def _launch(weights: ExpertWeights, arguments: FewArguments, device: torch.device, *, gated: bool) -> None:
    name = f"{STEM}_{'gate_up' if gated else 'down'}_{weights.kind}"
    space = shared_bytes(arguments.tokens, arguments.top_k, arguments.columns, weights.kind, gated=gated)
    chosen = cuda.kernel(STEM, ARCH, name, space, THREADS, device.index or 0)
    weight = weights.gate_up if gated else weights.down
    a_map = _map(weight.data_ptr(), tuple(weight.shape), weight.element_size(), 0 if gated else arguments.tile_rows)
    cuda.launch(chosen, sm_count(device), [a_map, arguments], device, pdl=pdl_on(device))


@functools.cache
def _map(address: int, shape: tuple[int, int, int], element_size: int, rows: int) -> ctypes.Array[ctypes.c_char]:
    """Of boxes of 8 rows of gate beside those of up, or of `rows` rows."""
    experts, height, columns = shape
    if rows == 0:
        return cuda.paired_map_at(address, height, columns, element_size, 2 * _GATE_ROWS, experts)
    return cuda.tensor_map_at(address, experts * height, columns, columns, element_size, rows)
