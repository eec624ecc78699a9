"""Checks the latent kernels on a GPU, then times decode and prefill beside what bounds them.

`python -m stoker_kernels.latent_attention.bench --models deepseek-v3,deepseek-v2-lite` prints µs of one layer: rows of
one token over contexts of equal length, and one prompt, with latents cached in bf16 and in e4m3. The limit is the
larger of the bytes of the latents over the bandwidth and the operations over the rate of cuBLAS in bf16.
Knows nothing of the model around it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stoker_kernels.attention import AttentionMeta, attention_workspace
from stoker_kernels.latent_attention import latent_attention, plan_latent_attention, reference
from stoker_kernels.launch.dispatch import pin
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import FP8, FP8_MAX

BANDWIDTH, OPERATIONS = 4.33e12, 772e12  # a second, of an H200: bytes of a read, operations of cuBLAS in bf16
# Heads, dimensions of a head that do not rotate, that do, of a value, of a latent.
MODELS = {
    "deepseek-v3": (128, 128, 64, 128, 512),
    "deepseek-v2-lite": (16, 128, 64, 128, 512),
    "minicpm3-4b": (40, 64, 32, 64, 256),
}
# Rows of decode and the tokens of each; prompts, with what lies in pages before them.
DECODES = ((1, 4096), (1, 65536), (16, 4096), (64, 4096), (256, 1024))
PROMPTS = ((2048, 0), (8192, 0), (2048, 8192))
PAGE = 64
CACHES = {"bf16": torch.bfloat16, "fp8": FP8}
CACHE_SCALE = 0.023  # of a cache in e4m3: no power of two, and no latent of these is clamped


@dataclass(frozen=True, slots=True)
class Row:
    """`rows` sequences of `tokens` new ones each and `context` before them: µs, and what bounds them."""

    model: str
    kernel: str
    cache: str
    rows: int
    tokens: int
    context: int
    us: float
    limit_us: float


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of the op."""

    q: Tensor
    own: Tensor
    cache: Tensor
    kv_b: Tensor
    meta: AttentionMeta
    cache_scale: Tensor | None

    def run(self, scale: float, *, planned: bool = True) -> Tensor:
        """One layer of it; `planned`: the step's plan is made once for all layers, and not timed."""
        meta = self.meta if planned else self.plan().meta
        kept = self.cache_scale
        return latent_attention(self.q, self.own, self.cache, self.kv_b, meta, scale=scale, cache_scale=kept)

    def plan(self) -> Step:
        """The same with the step's plan."""
        heads, _, rank = self.kv_b.shape
        kinds = {"dtype": self.q.dtype, "kv_dtype": self.cache.dtype}
        return replace(self, meta=plan_latent_attention(self.meta, heads=heads, rank=rank, **kinds))


def make_step(model: str, cache_name: str, rows: int, tokens: int, context: int, device: torch.device) -> Step:
    """Random sequences, whose pages lie anywhere."""
    heads, nope, rope, value, rank = MODELS[model]
    length, width = context + tokens, rank + rope
    each = -(-length // PAGE)
    table = torch.randperm(rows * each, device=device, dtype=torch.int32).view(rows, each)
    cache = torch.randn(rows * each, 1, PAGE, width, device=device).bfloat16()
    cache_scale = None
    if CACHES[cache_name] is FP8:
        cache_scale = torch.full((1,), CACHE_SCALE, device=device)
        cache = (cache / CACHE_SCALE).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    places = torch.arange(context, length, device=device)
    own = torch.cat([cache[table[row, places // PAGE].long(), 0, places % PAGE] for row in range(rows)])
    own = own if cache_scale is None else (own.float() * cache_scale).bfloat16()
    decodes = rows if tokens == 1 else 0
    meta = AttentionMeta(
        page_table=table,
        seq_slots=torch.arange(rows, device=device, dtype=torch.int32),
        query_start=torch.arange(rows + 1, device=device, dtype=torch.int32) * tokens,
        seq_lens=torch.full((rows,), length, device=device, dtype=torch.int32),
        num_decodes=decodes,
        max_query_len=tokens,
        max_seq_len=length,
        workspace=attention_workspace(rows, heads, rank, device),
    )
    kv_b = (torch.randn(heads, nope + value, rank, device=device) * rank**-0.5).bfloat16()
    q = torch.randn(rows * tokens, heads, nope + rope, device=device).bfloat16()
    return Step(q, own, cache, kv_b, meta, cache_scale)


def limit(model: str, cache_name: str, rows: int, tokens: int, context: int) -> float:
    """µs that the bytes or the operations of one layer take at least."""
    heads, nope, rope, value, rank = MODELS[model]
    absorbed, widened = 2 * heads * (2 * rank + rope), 2 * heads * (nope + rope + value)
    products = 2 * tokens * heads * (nope + value) * rank
    latents = rows * (context + tokens) * (rank + rope)
    moved = latents * CACHES[cache_name].itemsize + heads * (nope + value) * rank * 2
    if tokens == 1:
        operations = rows * ((context + 1) * absorbed + products)
    else:
        operations = rows * (tokens * context * absorbed + tokens * (tokens + 1) // 2 * widened + 2 * products)
    return max(moved / BANDWIDTH, operations / OPERATIONS) * 1e6


def timed(run: Callable[[], object], rounds: int = 16) -> float:
    """Median µs of `run` inside a graph of ten, over `rounds` replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) * 100


def check(model: str, cache_name: str, device: torch.device) -> list[str]:
    """Small steps against the reference; what is wrong, if anything."""
    _, nope, rope, *_ = MODELS[model]
    scale, complaints = (nope + rope) ** -0.5, []
    for rows, tokens, context in ((5, 1, 700), (3, 1, 0), (2, 130, 0), (2, 70, 333)):
        step = make_step(model, cache_name, rows, tokens, context, device)
        q, own, kv_b = (each.float() for each in (step.q, step.own, step.kv_b))
        cache, kept = step.cache, step.cache_scale
        cache = cache.float() if kept is None else cache
        want = reference.latent_attention(q, own, cache, kv_b, step.meta, scale=scale, cache_scale=kept)
        error = float((step.run(scale, planned=False).float() - want).norm() / want.norm())
        if not error < 1e-2:
            complaints.append(f"{model} in {cache_name}, {rows} rows of {tokens} after {context}: error {error:.2e}")
    return complaints


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="which shapes (default: %(default)s)")
    parser.add_argument("--kernels", default="", help="implementations in turn, of implementations('latent_attention')")
    parser.add_argument("--caches", default=",".join(CACHES), help="what latents are cached in (default: %(default)s)")
    parser.add_argument("--only", choices=("decode", "prefill"), help="time one kind of step")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    cases = [(model, cache) for model in options.models.split(",") for cache in options.caches.split(",")]
    enable_pdl(True)  # as the engine does
    found: list[Row] = []
    for kernel in options.kernels.split(","):
        if kernel:
            pin("latent_attention", kernel)
        complaints = [line for model, cache in cases for line in check(model, cache, device)]
        print(f"checked {options.models} in {options.caches} by {kernel or 'what is chosen'}: {len(complaints)} wrong")
        for line in complaints:
            print(" ", line)
        if complaints:
            return 1
        for model, cache in cases:
            found += time_model(model, kernel, cache, options.only, device)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    return 0


def time_model(model: str, kernel: str, cache: str, only: str | None, device: torch.device) -> list[Row]:
    """One layer's decode and prefill, printed as they are found."""
    scale = (MODELS[model][1] + MODELS[model][2]) ** -0.5
    cases = [(rows, 1, length - 1) for rows, length in DECODES] if only != "prefill" else []
    cases += [(1, tokens, context) for tokens, context in PROMPTS] if only != "decode" else []
    found = []
    for rows, tokens, context in cases:
        step = make_step(model, cache, rows, tokens, context, device).plan()
        us, least = timed(partial(step.run, scale)), limit(model, cache, rows, tokens, context)
        found.append(Row(model, kernel, cache, rows, tokens, context, us, least))
        print(
            f"{model:18} {kernel:8} {cache:4} {rows:4} × {tokens:5} after {context:6}: {us:9.1f} µs, limit "
            f"{least:9.1f} ({least / us:.0%})", flush=True
        )  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
