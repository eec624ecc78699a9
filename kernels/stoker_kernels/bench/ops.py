"""`python -m stoker_kernels.bench.ops`: norm, RoPE + KV write, activation, sampling: right first, then how fast.

Every op is compared with its reference at odd shapes before anything is timed; a wrong one ends the run. A time is a
call's share of a CUDA graph whose calls rotate over operands that together exceed the L2 three times, so reads are
cold; medians over replays. Bandwidth counts each byte that must be read or written once, beside what HBM reaches.
Knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stoker_kernels import activation, norm, rope, sampling
from stoker_kernels.activation import reference as activation_reference
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.norm import reference as norm_reference
from stoker_kernels.quant import FP8
from stoker_kernels.rope import reference as rope_reference
from stoker_kernels.sampling import SamplingState, SlotSampling, apply_slot_sampling, pack_slot_sampling
from stoker_kernels.sampling import reference as sampling_reference

HBM_TBPS = 4.33  # what a read of an H200 reaches
COLD_BYTES = 160e6  # three times an H200's L2
REPLAYS = 15
MIN_CALLS, MAX_CALLS = 8, 400
HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 3584, 18944, 28, 4, 128, 64
VOCAB = 152064
CUDA = torch.device("cuda")

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: microseconds a call, and TB/s of the bytes it must move."""

    op: str
    rows: int
    pdl: bool
    microseconds: float
    tbps: float


@dataclass(frozen=True, slots=True)
class Work:
    """Something to time: `call(i)` runs on operand set i of `sets`; `bytes` is what one call must move."""

    op: str
    rows: int
    bytes: float
    sets: int
    call: Call


def main() -> int:
    """Check, time, print a table; `--json` writes the rows too."""
    parser = argparse.ArgumentParser(prog="python -m stoker_kernels.bench.ops")
    parser.add_argument("--rows", default="1,16,128,1024,8192", help="rows (tokens) of norm, RoPE and activation")
    parser.add_argument("--sampling-rows", default="1,16,128,512", help="rows of sampling at V = 152064")
    parser.add_argument("--only", default="", help="time only the ops whose name contains this")
    parser.add_argument("--json", default="", help="a file to write the rows to")
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    print("correct at odd shapes; times are medians with a cold L2\n")
    print(f"{'op':34} {'rows':>6} {'PDL':>4} {'µs':>9} {'TB/s':>7} {'of ' + str(HBM_TBPS):>7}")
    works = itertools.chain(dense_works(numbers(options.rows)), sampling_works(numbers(options.sampling_rows)))
    table = []
    for work in works:
        if options.only not in work.op:
            continue
        for pdl in (False, True):
            row = measure(work, pdl=pdl)
            table.append(row)
            print(
                f"{row.op:34} {row.rows:6} {'yes' if row.pdl else 'no':>4} {row.microseconds:9.2f} {row.tbps:7.2f} "
                f"{100 * row.tbps / HBM_TBPS:6.0f}%",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in table], file, indent=1)
    return 0


def numbers(text: str) -> list[int]:
    """`1,16` → [1, 16]."""
    return [int(part) for part in text.split(",") if part]


def check() -> None:
    """Compare every timed op with its reference at odd shapes, into poisoned outputs. Raises AssertionError."""
    for rows in (1, 3, 65, 1025):
        check_dense(rows)
    for dtype in (torch.bfloat16, torch.float32):
        check_sampling(dtype)


def check_dense(rows: int) -> None:
    """Norm, activation and RoPE with KV write at `rows` tokens."""
    x, residual, weight = randn(rows, 1016), randn(rows, 1016), randn(1016)
    kept = residual.clone()
    expected = norm_reference.add_rms_norm(x, kept, weight, 1e-6)
    got = norm.add_rms_norm(x, residual, weight, 1e-6, out=torch.full_like(x, torch.nan))
    close(got, expected)
    close(residual, kept)
    gates, wanted = randn(rows, 2 * 1016), activation_reference.quantizing
    close(activation.silu_and_mul(gates), activation_reference.silu_and_mul(gates))
    for got_q, expected_q in (
        (activation.silu_and_mul_quant(gates), wanted(gates, FP8, "silu", gated=True, limit=0.0)),
        (activation.gelu_tanh_and_mul_quant(gates), wanted(gates, FP8, "gelu_tanh", gated=True, limit=0.0)),
        (activation.relu2_quant(x), wanted(x, FP8, "relu2", gated=False, limit=0.0)),
        (norm.rms_norm_quant(x, weight, 1e-6), norm_reference.rms_norm_quant(x, weight, 1e-6)),
    ):
        close(got_q.scale, expected_q.scale)
        close(got_q.data.float(), expected_q.data.float(), tolerance=0.126)
    for cache in (torch.bfloat16, torch.float8_e4m3fn):
        results = []
        for run in (rope.qk_norm_rope_kv_write, rope_reference.qk_norm_rope_kv_write):
            torch.manual_seed(rows)
            operands = RopeOperands.random(rows, cache)
            results.append([run(*operands.tensors, **operands.options), operands.tensors[4], operands.tensors[5]])
        for got, expected in zip(*results, strict=True):
            close(got.float(), expected.float(), tolerance=0.126 if expected.dtype == torch.float8_e4m3fn else 0.02)


def check_sampling(dtype: torch.dtype) -> None:
    """Tokens of every kind of row equal the CPU reference's."""
    vocab = 50257
    logits = (2 * randn(len(SAMPLERS), vocab)).to(dtype)
    for adjust in (False, True):
        mine, theirs = sampling_state(len(SAMPLERS), vocab, CUDA), sampling_state(len(SAMPLERS), vocab)
        rows = torch.arange(len(SAMPLERS), dtype=torch.int32)
        got = sampling.sample(logits, mine, rows.cuda(), rows.cuda(), adjust=adjust)
        expected = sampling_reference.sample(logits.cpu(), theirs, rows, rows, adjust=adjust)
        assert got.tolist() == expected.tolist(), (dtype, adjust, got.tolist(), expected.tolist())
    assert torch.equal(sampling.argmax(logits).cpu(), sampling_reference.argmax(logits.cpu()))
    tokens = torch.arange(len(SAMPLERS), dtype=torch.int32)
    got = sampling.token_logprobs(logits, tokens.cuda(), 5).cpu()
    expected = sampling_reference.token_logprobs(logits.cpu(), tokens, 5)
    torch.testing.assert_close(got[:, :2], expected[:, :2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[:, 7:], expected[:, 7:], rtol=1e-4, atol=1e-4)


def randn(*shape: int) -> Tensor:
    """Random bf16 on the GPU."""
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def close(got: Tensor, expected: Tensor, tolerance: float = 0.02) -> None:
    """Raise AssertionError unless equal within bf16's rounding, and free of NaN."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True, slots=True)
class RopeOperands:
    """The arguments of one RoPE + KV write."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]

    @staticmethod
    def random(rows: int, cache: torch.dtype, *, normed: bool = True) -> RopeOperands:
        """A 7B's heads; every token goes to a page of its own choosing."""
        pages = -(-rows // PAGE) + 1
        shape = (pages, KV_HEADS, PAGE, HEAD_DIM)
        tensors = (
            randn(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM),
            torch.randint(4096, (rows,), device=CUDA, dtype=torch.int32),
            torch.randperm(pages * PAGE, device=CUDA)[:rows],
            torch.randn(4096, HEAD_DIM, device=CUDA),
            torch.zeros(shape, device=CUDA).to(cache),
            torch.zeros(shape, device=CUDA).to(cache),
        )
        options: dict[str, Any] = {"num_q_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        if normed:
            options |= {"q_norm": randn(HEAD_DIM), "k_norm": randn(HEAD_DIM)}
        if cache == torch.float8_e4m3fn:
            scales = torch.full((2, KV_HEADS), 0.02, device=CUDA)
            options |= {"k_scale": scales[0], "v_scale": scales[1]}
        return RopeOperands(tensors, options)


def dense_works(rows: Iterable[int]) -> Iterator[Work]:
    """Norm, activation and RoPE at a 7B's shapes."""
    for count in rows:
        yield from norm_works(count)
        yield from activation_works(count)
        for cache, name in ((torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8")):
            yield rope_work(count, cache, name)


def norm_works(rows: int) -> Iterator[Work]:
    """add_rms_norm, and the same with quantization."""
    weight = randn(HIDDEN)
    moved = rows * HIDDEN * 2.0
    sets = set_count(2 * moved)
    x, residual = randn(sets, rows, HIDDEN), randn(sets, rows, HIDDEN)
    out = torch.empty_like(x[0])
    yield Work(
        "add_rms_norm 3584", rows, 4 * moved, sets,
        lambda i: norm.add_rms_norm(x[i], residual[i], weight, 1e-6, out=out),
    )  # fmt: skip
    yield Work(
        "add_rms_norm_quant 3584", rows, 3.5 * moved, sets,
        lambda i: norm.add_rms_norm_quant(x[i], residual[i], weight, 1e-6),
    )  # fmt: skip


def activation_works(rows: int) -> Iterator[Work]:
    """silu_and_mul, and the same with quantization, as gelu by its tanh form and relu² without a gate."""
    moved = rows * INTERMEDIATE * 2.0
    sets = set_count(2 * moved)
    x = randn(sets, rows, 2 * INTERMEDIATE)
    out = randn(rows, INTERMEDIATE)
    yield Work("silu_and_mul 18944", rows, 3 * moved, sets, lambda i: activation.silu_and_mul(x[i], out=out))
    yield Work("silu_and_mul_quant 18944", rows, 2.5 * moved, sets, lambda i: activation.silu_and_mul_quant(x[i]))
    yield Work(
        "gelu_tanh_and_mul_quant 18944", rows, 2.5 * moved, sets, lambda i: activation.gelu_tanh_and_mul_quant(x[i])
    )
    yield Work("relu2_quant 37888", rows, 3 * moved, sets, lambda i: activation.relu2_quant(x[i]))


def rope_call(operands: list[RopeOperands], out: Tensor) -> Call:
    """The op on operand set i."""
    return lambda i: rope.qk_norm_rope_kv_write(*operands[i].tensors, **operands[i].options, out=out)


def rope_work(rows: int, cache: torch.dtype, name: str) -> Work:
    """QK-norm, RoPE and KV write of a 7B's heads."""
    read = rows * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM * 2.0 + HEAD_DIM * 4)
    written = rows * HEAD_DIM * (Q_HEADS * 2.0 + 2 * KV_HEADS * cache.itemsize)
    sets = set_count(read)
    operands = [RopeOperands.random(rows, cache) for _ in range(sets)]
    out = torch.empty(rows, Q_HEADS, HEAD_DIM, device=CUDA, dtype=torch.bfloat16)

    return Work(f"qk_norm_rope_kv_write {name}", rows, read + written, sets, rope_call(operands, out))


HISTORY = tuple(range(0, 4000, 3))
SAMPLERS = {
    "greedy": SlotSampling(0),
    "temperature": SlotSampling(0, temperature=0.8, seed=1),
    "top_k 20": SlotSampling(0, temperature=0.7, seed=2, top_k=20),
    "top_p 0.9": SlotSampling(0, temperature=1.0, seed=3, top_p=0.9),
    "top_k 20 top_p 0.8": SlotSampling(0, temperature=0.7, seed=4, top_k=20, top_p=0.8),
    "min_p 0.05": SlotSampling(0, temperature=1.0, seed=5, min_p=0.05),
    "top_k 20 top_p 0.8 penalties": SlotSampling(
        0, temperature=0.7, seed=6, top_k=20, top_p=0.8, repetition_penalty=1.05, presence_penalty=0.5, prompt=HISTORY
    ),
}


def sampling_state(slots: int, vocab: int, device: torch.device | None = None, kind: str = "") -> SamplingState:
    """A state whose slots are all of `kind`, or one of each kind."""
    device = device or torch.device("cpu")
    kinds = [SAMPLERS[kind]] * slots if kind else [*SAMPLERS.values()]
    updates = [replace(each, slot=slot) for slot, each in enumerate(kinds)]
    state = SamplingState.allocate(slots, vocab, device)
    packed = torch.from_numpy(pack_slot_sampling(updates, vocab)).to(device)
    apply_slot_sampling(packed, len(updates), state)
    return state


def sampling_works(rows: Iterable[int]) -> Iterator[Work]:
    """Every kind of sampler, over flat logits (random weights) and over peaked ones (as a trained model's)."""
    for count in rows:
        moved = count * VOCAB * 2.0
        sets = set_count(moved)
        flat = randn(sets, count, VOCAB)
        peaked = 2 * flat
        peaked[..., :: VOCAB // 30] += 8 + 8 * torch.rand(31, device=CUDA, dtype=torch.bfloat16)
        slots = torch.arange(count, dtype=torch.int32, device=CUDA)
        yield Work("argmax", count, moved, sets, argmax_call(flat))
        yield Work("token_logprobs top 20", count, moved, sets, logprobs_call(flat, slots.clone()))
        for kind in [*SAMPLERS][1:]:
            state = sampling_state(count, VOCAB, CUDA, kind)
            for shape, logits in (("flat", flat), ("peaked", peaked)):
                call = sample_call(logits, state, slots, adjust="penalties" in kind)
                yield Work(f"{kind}, {shape}", count, moved, sets, call)


def argmax_call(logits: Tensor) -> Call:
    """argmax of logits set i."""
    return lambda i: sampling.argmax(logits[i])


def logprobs_call(logits: Tensor, tokens: Tensor) -> Call:
    """Log-probabilities and 20 alternatives for logits set i."""
    return lambda i: sampling.token_logprobs(logits[i], tokens, 20)


def sample_call(logits: Tensor, state: SamplingState, slots: Tensor, *, adjust: bool) -> Call:
    """Tokens for logits set i, a row a slot; the slot's number is its position too."""
    return lambda i: sampling.sample(logits[i], state, slots, slots, adjust=adjust)


def set_count(read_bytes: float) -> int:
    """Operand sets that together exceed the L2 three times, within reason."""
    return int(min(64, max(2, -(-COLD_BYTES // read_bytes))))


def measure(work: Work, *, pdl: bool) -> Row:
    """Median microseconds of a call within a replayed graph."""
    enable_pdl(pdl)
    calls = min(MAX_CALLS, max(work.sets, MIN_CALLS))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            work.call(i % work.sets)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work.call(i % work.sets)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    enable_pdl(False)
    microseconds = statistics.median(times)
    return Row(work.op, work.rows, pdl, microseconds, work.bytes / microseconds / 1e6)


if __name__ == "__main__":
    sys.exit(main())
