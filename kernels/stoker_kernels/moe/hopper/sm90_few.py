"""Experts for few tokens on Hopper, where the bytes of those chosen are the limit: host side of csrc/sm90_few_experts.

Two launches: gate-up with its activation, and down with the weighted sum; activations of experts in FP8 are quantized
inside. Rows are dealt to the SMs by number, whatever the routing is. `mixture` has both choose the experts, too.
Invariants: a launch never synchronises and can be captured after one launch of its kind; a token's bits depend on its
own row and choices alone.
Does not know: for how many tokens other kernels are faster (`choose`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from stoker_kernels.launch import cuda
from stoker_kernels.launch.dispatch import sm_count
from stoker_kernels.launch.pdl import pdl_on
from stoker_kernels.moe.hopper.operands import few_refusal, room_refusal
from stoker_kernels.moe.types import CLAMPED_SLOPE, ExpertActivation, ExpertKind, ExpertWeights, Routes, Routing

STEM, ARCH = "sm90_few_experts", "sm_90a"
THREADS = 256
MOST_TOKENS = 16  # of one tile of a plan
WHOLE_ROWS = range(1, 3)  # tokens for which a warp of gate-up takes all columns of its rows; of eight at most
MOST_EXPERTS, MOST_PAIRS = 256, 32  # that a warp chooses from, eight a lane, and sorts, one a lane
_GATE_ROWS, _DOWN_ROWS = 8, 16  # of a stage: of gate and of up each, and of down at most
_BOX_COLUMNS = {"dense": 64, "fp8_channel": 128, "fp8_block": 128}
_BOXES = 2  # of 128 bytes a row in a stage
_RING, _BARRIERS, _PITCH = 65_536, 256, 20


class FewArguments(ctypes.Structure):
    """FewArguments of csrc/sm90_few_experts.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "x", "scale", "bias", "order", "tiles", "ids", "weights")),
        *((name, ctypes.c_void_p) for name in ("logits", "correction", "slots", "counts")),
        *((name, ctypes.c_void_p) for name in ("shared", "shared_gate")),
        *((name, ctypes.c_float) for name in ("limit", "slope")),
        *((name, ctypes.c_int) for name in ("clamped", "tokens", "top_k", "num_tiles", "rows", "columns", "tile_rows")),
        *((name, ctypes.c_int) for name in ("row_tiles", "chunks", "boxes", "whole", "ld_x", "ld_shared")),
        *((name, ctypes.c_int) for name in ("experts", "ld_logits", "groups", "group_size", "top_groups")),
        *((name, ctypes.c_int) for name in ("sigmoid", "renormalize", "top2")),
        ("factor", ctypes.c_float),
    ]


def shared_bytes(tokens: int, top_k: int, columns: int, kind: ExpertKind, *, gated: bool) -> int:
    """Dynamic shared memory: the ring on a multiple of 1024 bytes, barriers, the plan, rows of x, sums of tokens."""
    pairs, chunks = tokens * top_k, -(-_boxes(columns, kind) // _BOXES)
    x_rows, sums = (tokens, 0 if tokens in WHOLE_ROWS else 2 * tokens) if gated else (pairs, pairs)
    plan = 16 * pairs + 3 * 16 * -(-pairs // 4) + 16 * -(-x_rows // 4)
    rows = x_rows * (chunks * _BOXES * _BOX_COLUMNS[kind] * 2 + 16)
    return 1024 + _RING + _BARRIERS + plan + rows + sums * chunks * _PITCH * 4


def _boxes(columns: int, kind: ExpertKind) -> int:
    return -(-columns // _BOX_COLUMNS[kind])


def down_rows(hidden: int, sms: int) -> int:
    """Rows of down in a stage, an even number: as many that every SM takes equally many stages, as far as that goes."""
    rounds = -(-hidden // (_DOWN_ROWS * sms))
    return 2 * -(-hidden // (2 * rounds * sms))


def refusal(x: Tensor, routes: Routes, weights: ExpertWeights, shared: Tensor | None) -> str | None:
    """None where `experts` takes these operands, else why not."""
    if routes.plan is None:
        return "reads the plan of route on CUDA"
    return _shapes_refusal(x, routes.ids.shape[1], weights, shared)


def mixture_refusal(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    shared: Tensor | None,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
) -> str | None:
    """None where `mixture` takes these operands, else why not."""
    pairs = logits.shape[0] * routing.top_k
    if pairs > MOST_PAIRS:
        return f"{pairs} choices are more than {MOST_PAIRS}"
    return choice_refusal(logits, routing, bias, slot_mapping, counts) or _shapes_refusal(
        x, routing.top_k, weights, shared
    )


def choice_refusal(
    logits: Tensor, routing: Routing, bias: Tensor | None, slot_mapping: Tensor | None, counts: Tensor | None
) -> str | None:
    """None where csrc/few_choice chooses from these operands, else why not."""
    beside = ((bias, torch.float32), (slot_mapping, torch.int64), (counts, torch.int32))
    if any(each is not None and (each.dtype != dtype or not each.is_contiguous()) for each, dtype in beside):
        return "takes a bias in float32, slots in int64 and counts in int32, contiguous"
    if logits.dtype != torch.bfloat16 or logits.stride(1) != 1:
        return "takes logits in bfloat16, those of a token one after the other"
    if routing.scoring == "sparsemixer":
        return "chooses by softmax or sigmoid"
    if logits.shape[1] > MOST_EXPERTS or routing.groups > 32:
        return f"{logits.shape[1]} experts in {routing.groups} groups are more than {MOST_EXPERTS} in 32"
    return None


def fill_plan(arguments: FewArguments, routes: Routes) -> None:
    """What was chosen, of routes that have a plan."""
    plan = routes.plan
    assert plan is not None
    arguments.order, arguments.tiles = plan.order.data_ptr(), plan.tiles.data_ptr()
    arguments.ids, arguments.weights = routes.ids.data_ptr(), routes.weights.data_ptr()
    arguments.num_tiles = plan.tiles.shape[0]


def fill_activation(arguments: FewArguments, activation: ExpertActivation, limit: float) -> None:
    """How gate-up opens."""
    clamped = activation == "clamped"
    arguments.limit, arguments.clamped, arguments.slope = limit, int(clamped), CLAMPED_SLOPE if clamped else 1.0


def fill_shared(arguments: FewArguments, shared: Tensor | None, shared_gate: Tensor | None) -> None:
    """What down adds."""
    arguments.shared, arguments.shared_gate = cuda.address_of(shared), cuda.address_of(shared_gate)
    arguments.ld_shared = 0 if shared is None else shared.stride(0)


def fill_choice(
    arguments: FewArguments, logits: Tensor, routing: Routing, bias: Tensor | None, slot_mapping: Tensor | None,
    counts: Tensor | None,
) -> None:  # fmt: skip
    """What csrc/few_choice reads."""
    arguments.logits, arguments.ld_logits, arguments.experts = logits.data_ptr(), logits.stride(0), logits.shape[1]
    arguments.correction, arguments.slots = cuda.address_of(bias), cuda.address_of(slot_mapping)
    arguments.counts = cuda.address_of(counts)
    arguments.groups, arguments.top_groups = routing.groups, routing.top_groups
    arguments.group_size, arguments.top2 = logits.shape[1] // routing.groups, int(routing.group_score == "top2")
    arguments.sigmoid, arguments.renormalize = int(routing.scoring == "sigmoid"), int(routing.renormalize)
    arguments.factor = routing.scale


def _shapes_refusal(x: Tensor, top_k: int, weights: ExpertWeights, shared: Tensor | None) -> str | None:
    tokens = x.shape[0]
    reason = few_refusal(x, weights, shared, MOST_TOKENS)
    if reason is not None:
        return reason
    room = max(
        shared_bytes(tokens, top_k, weights.hidden, weights.kind, gated=True),
        shared_bytes(tokens, top_k, weights.ffn, weights.kind, gated=False),
    )
    return room_refusal(room, tokens, top_k, weights.ffn) or cuda.missing_cubin(STEM, ARCH)


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

    def chosen(arguments: FewArguments) -> None:
        fill_plan(arguments, routes)

    return _run(x, routes.ids.shape[1], weights, out, chosen, activation, limit, shared, shared_gate)


def mixture(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    counts: Tensor | None = None,
    activation: ExpertActivation = "silu",
    limit: float = 0.0,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """`moe.mixture` for operands that `mixture_refusal` accepts, as `experts`."""

    def chosen(arguments: FewArguments) -> None:
        fill_choice(arguments, logits, routing, bias, slot_mapping, counts)

    return _run(x, routing.top_k, weights, out, chosen, activation, limit, shared, shared_gate)


def _run(
    x: Tensor, top_k: int, weights: ExpertWeights, out: Tensor, chosen: Callable[[FewArguments], None],
    activation: ExpertActivation, limit: float, shared: Tensor | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """`chosen` fills in the choice, or what it is made from."""
    tokens, ffn, hidden, device = x.shape[0], weights.ffn, weights.hidden, x.device
    inner = torch.empty((tokens * top_k, ffn), dtype=x.dtype, device=device)
    gate_up = _arguments(inner, x, top_k, tokens, (ffn, hidden, _GATE_ROWS, _boxes(hidden, weights.kind)))
    gate_up.scale, gate_up.bias = cuda.address_of(weights.gate_up_scale), cuda.address_of(weights.gate_up_bias)
    gate_up.whole = int(tokens in WHOLE_ROWS)
    fill_activation(gate_up, activation, limit)
    chosen(gate_up)
    _launch(weights, gate_up, device, gated=True)
    sizes = (hidden, ffn, down_rows(hidden, sm_count(device)), _boxes(ffn, weights.kind))
    down = _arguments(out, inner, top_k, tokens, sizes)
    down.scale, down.bias = cuda.address_of(weights.down_scale), cuda.address_of(weights.down_bias)
    fill_shared(down, shared, shared_gate)
    chosen(down)
    _launch(weights, down, device, gated=False)
    return out


def _arguments(out: Tensor, x: Tensor, top_k: int, tokens: int, sizes: tuple[int, int, int, int]) -> FewArguments:
    """`sizes`: rows and columns of an expert, rows of a stage, boxes of a row."""
    rows, columns, tile_rows, boxes = sizes
    return FewArguments(
        out=out.data_ptr(), x=x.data_ptr(), slope=1.0, tokens=tokens, top_k=top_k, rows=rows, columns=columns,
        tile_rows=tile_rows, row_tiles=-(-rows // tile_rows), chunks=-(-boxes // _BOXES), boxes=boxes, ld_x=x.stride(0),
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
