"""Finds the tiles that make a decode layer fastest: `python -m stoker_kernels.bench.layer [--json FILE]`.

Times the chain norm → qkv → rope and KV write → output → norm → gate_up → activation → down over several layers with
weights of their own, in one CUDA graph with programmatic dependent launch, as the engine runs it (attention apart).
Starting from cuBLAS everywhere it tries every tile of ours for each product and keeps what shortens the chain. What
counts is the layer: a kernel that fills its ring while its predecessor drains gains more than its own time shows.
Invariants: only families whose check passed are timed (`gemm.bench`); all weights together exceed L2 many times.
Does not know: attention, and which rows `gemm/table.py` has; it prints what they should be.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from stoker_kernels.activation import silu_and_mul, silu_and_mul_quant
from stoker_kernels.gemm import choose, small, table, tiles
from stoker_kernels.gemm.bench import BANDWIDTH, FAMILIES, check_all, label, timed_tiles
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch import pdl
from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant
from stoker_kernels.quant import LinearWeight, Quantized, quantize_fp8, quantize_weight
from stoker_kernels.rope import qk_norm_rope_kv_write

PAGE, HEAD_DIM, EPS = 64, 128, 1e-6
DEVICE = "cuda"
Tiles = dict[tuple[int, int], AnyTile | None]
"""(N, K) → tile of ours, or None for cuBLAS."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layer: hidden size, feed-forward size, query and KV heads, vocabulary, layers to rotate through."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int


SHAPES = {
    "7b": Shape(3584, 18944, 28, 4, 152064, 4),
    "1.5b": Shape(1536, 8960, 12, 2, 151936, 8),
    "0.6b": Shape(1024, 3072, 16, 8, 151936, 16),
}


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Random weights of `layers` layers and an output head."""

    shape: Shape
    layers: list[dict[str, LinearWeight]]
    head: LinearWeight
    norm: torch.Tensor
    qkv_bias: torch.Tensor

    @property
    def fp8(self) -> bool:
        """Whether the layers are FP8 (the head never is)."""
        return self.layers[0]["qkv"].kind != "dense"

    def products(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the layer's products, the longest first."""
        layer = self.layers[0]
        return {name: tuple(layer[name].data.shape) for name in ("gate_up", "down", "qkv", "o")}  # type: ignore[misc]

    def layer_bytes(self) -> int:
        """Bytes of one layer's weights."""
        return sum(weight.data.numel() * weight.data.element_size() for weight in self.layers[0].values())


def random_weights(shape: Shape, fp8: bool) -> Weights:
    """Weights of order 1/√K."""
    q, kv = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    sizes = {"qkv": (q + 2 * kv, shape.hidden), "o": (shape.hidden, q),
             "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate)}

    def weight(n: int, k: int, quantized: bool) -> LinearWeight:
        values = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * k**-0.5
        return quantize_weight(values, "fp8_channel" if quantized else "dense")

    layers = [{name: weight(*size, fp8) for name, size in sizes.items()} for _ in range(shape.layers)]
    return Weights(shape, layers, weight(shape.vocab, shape.hidden, False),
                   torch.ones(shape.hidden, device=DEVICE, dtype=torch.bfloat16),
                   torch.zeros(q + 2 * kv, device=DEVICE, dtype=torch.bfloat16))


@dataclass(slots=True, eq=False)
class Chain:
    """The layers of `weights` for m tokens, with a choice of tile for each product."""

    weights: Weights
    m: int
    tiles: Tiles = field(default_factory=dict)
    fused: Tile | WideTile | None = None
    residual: torch.Tensor = field(init=False)
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        s = self.weights.shape
        cache = (self.m + 1, s.kv_heads, PAGE, HEAD_DIM)
        self.residual = torch.randn(self.m, s.hidden, device=DEVICE, dtype=torch.bfloat16)
        self.state = {
            "positions": torch.full((self.m,), 200, device=DEVICE, dtype=torch.int32),
            "slot_mapping": torch.arange(self.m, device=DEVICE, dtype=torch.int64) * PAGE,
            "cos_sin": torch.ones(256, HEAD_DIM, device=DEVICE),
            "k_cache": torch.zeros(cache, device=DEVICE, dtype=torch.bfloat16),
            "v_cache": torch.zeros(cache, device=DEVICE, dtype=torch.bfloat16),
        }

    def product(
        self, x: torch.Tensor | Quantized, weight: LinearWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`linear` by this chain's tiles."""
        return choose.route(x, weight, bias, None, lambda fp8, n, k, m: self.tiles.get((n, k)))

    def norm(self, update: torch.Tensor) -> torch.Tensor | Quantized:
        """Add-and-norm in the form that the layer's products read."""
        normed = add_rms_norm_quant if self.weights.fp8 else add_rms_norm
        return normed(update, self.residual, self.weights.norm, EPS)

    def layer(self, update: torch.Tensor, weights: dict[str, LinearWeight]) -> torch.Tensor:
        """One decode layer but for attention."""
        s = self.weights.shape
        query = qk_norm_rope_kv_write(
            self.product(self.norm(update), weights["qkv"], self.weights.qkv_bias), **self.state,
            num_q_heads=s.heads, num_kv_heads=s.kv_heads, head_dim=HEAD_DIM,
        )  # fmt: skip
        hidden = self.norm(self.product(query.view(self.m, -1), weights["o"]))
        return self.product(self.activated(hidden, weights["gate_up"]), weights["down"])

    def activated(self, hidden: torch.Tensor | Quantized, weight: LinearWeight) -> torch.Tensor | Quantized:
        """silu(gate) · up, by one kernel where this chain has a fused one."""
        if self.fused is None:
            gate_up = self.product(hidden, weight)
            return silu_and_mul_quant(gate_up) if self.weights.fp8 else silu_and_mul(gate_up)
        out = torch.empty(self.m, weight.out_features // 2, device=DEVICE, dtype=torch.bfloat16)
        data, scale = (hidden.data, hidden.scale) if isinstance(hidden, Quantized) else (hidden, None)
        tiles.launch(self.fused, Operands(data, weight.data, out, None, weight.scale, scale), pdl=True)
        return quantize_fp8(out) if self.weights.fp8 else out

    def run(self) -> None:
        """Every layer twice."""
        update = torch.zeros_like(self.residual)
        for weights in self.weights.layers * 2:
            update = self.layer(update, weights)

    def run_head(self) -> None:
        """The last norm and the output head, four times."""
        update = torch.zeros_like(self.residual)
        for _ in range(4):
            self.product(add_rms_norm(update, self.residual, self.weights.norm, EPS), self.weights.head)

    def layer_us(self, replays: int = 7) -> float:
        """Median microseconds of one layer."""
        return graph_us(self.run, replays) / (2 * len(self.weights.layers))

    def head_us(self, replays: int = 5) -> float:
        """Median microseconds of the last norm and the output head."""
        return graph_us(self.run_head, replays) / 4


def graph_us(body: Any, replays: int) -> float:
    """Median microseconds of a replay of `body`, captured after one run outside the capture."""
    stream = _capture_stream()
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        body()
        graph.capture_end()
    times = []
    for _ in range(replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times[1:]))


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def tune(chain: Chain, families: list[str], fp8: bool) -> list[dict[str, Any]]:
    """From cuBLAS everywhere, product by product: every tile in the chain, the fastest stays. Returns all samples."""
    tokens, samples = small.token_tile(chain.m), []
    wanted = [family for family in families if family.endswith("e4m3" if fp8 else "bf16")]
    best = chain.layer_us()
    for name, key in chain.weights.products().items():
        tried: list[tuple[float, str, Tile | None]] = [(best, "cublas", None)]
        for tile in (t for family in wanted for t in timed_tiles(family, tokens, chain.weights.layers[0][name].data)):
            chain.tiles[key] = tile
            tried.append((chain.layer_us(), label(tile), tile))
        tried.sort(key=lambda sample: sample[0])
        best, _, chain.tiles[key] = tried[0]
        base = next(us for us, text, _ in tried if text == "cublas")
        shown = tried[:4] + [next((t for t in tried if t[1].startswith(f)), tried[0]) for f in ("cluster", "multicast")]
        cells = [f"{text} {us:.1f}" for us, text, _ in dict.fromkeys(shown)]
        print(f"  {name}: cublas {base:.1f} | " + " | ".join(cells), flush=True)
        samples += [{"product": name, "n": key[0], "k": key[1], "tile": text, "layer_us": us} for us, text, _ in tried]
    return samples


def tune_head(chain: Chain, families: list[str]) -> list[dict[str, Any]]:
    """The output head by itself, behind a norm."""
    key = tuple(chain.weights.head.data.shape)
    limit = chain.weights.head.data.numel() * 2 / BANDWIDTH * 1e6
    tried = [(chain.head_us(), "cublas")]
    tiles = timed_tiles("cluster-bf16", small.token_tile(chain.m), chain.weights.head.data)
    for tile in tiles if "cluster-bf16" in families else ():
        chain.tiles[key] = tile  # type: ignore[index]
        tried.append((chain.head_us(), label(tile)))
    cells = [f"{text} {us:.1f}" for us, text in [tried[0], *sorted(tried)[:4]]]
    print(f"  head {key}: limit {limit:.1f} | " + " | ".join(cells), flush=True)
    return [{"product": "head", "n": key[0], "k": key[1], "tile": text, "layer_us": us} for us, text in tried]


def by_table(fp8: bool, m: int, weights: Weights) -> Tiles:
    """What `gemm/table.py` says now."""
    return {key: table.best_tile(fp8, *key, m) for key in weights.products().values()}


def measure(model: str, fp8: bool, tokens: tuple[int, ...], families: list[str], until: float) -> list[dict[str, Any]]:
    """Every way for one model and dtype; prints µs a layer for each."""
    weights, found = random_weights(SHAPES[model], fp8), []
    limit = weights.layer_bytes() / BANDWIDTH * 1e6
    for m in tokens:
        if time.monotonic() > until:
            print(f"out of time before {model} {'fp8' if fp8 else 'bf16'} M={m}")
            break
        chain = Chain(weights, m)
        blas = chain.layer_us()
        now = Chain(weights, m, by_table(fp8, m, weights)).layer_us()
        print(f"{model} {'fp8' if fp8 else 'bf16'} M={m}, us a layer: limit {limit:.1f}, cublas {blas:.1f}, "
              f"table {now:.1f}", flush=True)
        samples = tune(chain, families, fp8)
        tuned = chain.layer_us()
        texts = {key: tile and table.text_of(tile) for key, tile in chain.tiles.items()}
        print(f"  tuned {tuned:.1f} ({limit / tuned:.0%} of the limit), {blas - tuned:.1f} below cublas: {texts}",
              flush=True)
        if not fp8:
            samples += tune_head(chain, families)
        found += [{"model": model, "fp8": fp8, "m": m, "trigger_first": bool(pdl.TRIGGER_FIRST.value)} | s
                  for s in samples]
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="tune the products of a decode layer in their chain")
    parser.add_argument("--json", help="write every sample here")
    parser.add_argument("--seconds", type=float, default=100, help="start no further measurement after this long")
    parser.add_argument("--work", default="7b:bf16,7b:fp8", help="model:dtype, several by commas")
    parser.add_argument("--tokens", default="1,16,64,128")
    parser.add_argument("--unchecked", action="store_true", help="skip the checks: they have just been run")
    parser.add_argument("--trigger-late", action="store_true", help="trigger dependents after the wait, not before")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    families = list(FAMILIES) if options.unchecked else check_all()
    torch.cuda.init()
    pdl.enable_pdl(True)
    if options.trigger_late:
        pdl.TRIGGER_FIRST = triton.language.constexpr(False)
    tokens = tuple(int(m) for m in options.tokens.split(","))
    samples: list[dict[str, Any]] = []
    with torch.inference_mode():
        for model, dtype in (pair.split(":") for pair in options.work.split(",")):
            samples += measure(model, dtype == "fp8", tokens, families, until)
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(samples, file)
    return 0 if len(families) == len(FAMILIES) else 1


if __name__ == "__main__":
    sys.exit(main())
