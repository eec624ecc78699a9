"""Checks and times gate, up and activation in one kernel: `python -m stoker_kernels.bench_fused [--json FILE]`.

First every fused tile against the definition, in a process of its own under a time limit. Then the chain of a decode
layer (`bench_layer.Chain`, tiles by `gemm_table`) with two kernels and with each fused one, and the output head by
`linear=wide` beside cuBLAS. Prints the rows that `gemm_table.GATED` should have.
Invariants: nothing is timed after a failed check; all weights together exceed L2 many times.
Does not know: what the engine runs (`--kernel linear_silu_mul=fused` makes it run the fused kernels).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from stoker_kernels import gemm_cuda, gemm_gated, gemm_small, gemm_table, pdl
from stoker_kernels.bench_gemm import complaint, refused_cut
from stoker_kernels.bench_layer import SHAPES, Chain, Weights, by_table, graph_us, random_weights
from stoker_kernels.gemm_small import Tile
from stoker_kernels.gemm_wide import WideTile
from stoker_kernels.linear_weight import LinearWeight

CHECK_TOKENS = (1, 7, 8, 16, 33, 64, 65, 100, 128, 200, 300, 2200)
CHECK_SHAPES = ((18944, 3584), (8960, 1536), (3072, 1024), (520, 1152))  # F, K
CHECK_SECONDS = 60


def fused_tiles(m: int, weight: torch.Tensor) -> list[Tile | WideTile]:
    """The fused tiles worth timing for m tokens."""
    if m > gemm_table.GATED_SMALL:
        return [WideTile(rows, gated=True) for rows in (288, 256)]
    tokens = gemm_small.token_tile(m)
    texts = [f"{kernel}k{size}{ring}" for kernel in ("64x1", "64x2", "128x1") for size in (1, 2) for ring in ("", "=")]
    tiles = [replace(gemm_table.parse(text, tokens), gated=True) for text in texts]
    return [tile for tile in dict.fromkeys(tiles) if refused_cut(tile, weight) is None]


def label(tile: Tile | WideTile) -> str:
    """As `gemm_table.GATED` writes it, or the wide tile's rows."""
    return gemm_table.text_of(tile) if isinstance(tile, Tile) else f"wide{tile.rows}"


def check() -> int:
    """Every tile at every size, with and without dependent launch, twice for equal bits. Returns how many are wrong."""
    right, wrong = 0, 0
    for f, k in CHECK_SHAPES:
        weight = torch.randn(2 * f, k, device="cuda").mul_(k**-0.5).bfloat16()
        for m in CHECK_TOKENS:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            both = x.float() @ weight.float().T
            gate, up = both.chunk(2, dim=1)
            fused = (gate * torch.sigmoid(gate) * up).double()
            for tile in fused_tiles(m, weight):
                found = _wrong(tile, x, weight, fused)
                right, wrong = right + (found is None), wrong + (found is not None)
                if found is not None and wrong <= 12:
                    print(f"WRONG {label(tile)} M={m} F={f} K={k}: {found}", flush=True)
            for rows in (288, 256):
                plain = WideTile(rows, gated=False)
                found = _wrong(plain, x, weight, both.double())
                right, wrong = right + (found is None), wrong + (found is not None)
                if found is not None and wrong <= 12:
                    print(f"WRONG ungated {label(plain)} M={m} N={2 * f} K={k}: {found}", flush=True)
    print(f"check fused: {right} of {right + wrong} right", flush=True)
    return wrong


def _wrong(tile: Tile | WideTile, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor) -> str | None:
    first = None
    for dependent in (False, True, True):
        out = torch.full(expected.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        gemm_gated.launch(tile, x, weight, out, pdl=dependent)
        torch.cuda.synchronize()
        found = complaint(out, expected, 4e-3)
        if found is not None:
            return f"pdl={dependent}: {found}"
        if first is not None and not torch.equal(first, out):
            return "not the same bits twice"
        first = out
    return None


def checked() -> bool:
    """`check` in a process of its own, so that a kernel that hangs or faults takes nothing with it."""
    process = subprocess.Popen([sys.executable, "-m", "stoker_kernels.bench_fused", "--check"])
    try:
        return process.wait(CHECK_SECONDS) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"check fused: HUNG for {CHECK_SECONDS} s", flush=True)
        return False


def time_layer(model: str, weights: Weights, m: int) -> list[dict[str, Any]]:
    """The chain with two kernels and with each fused tile; prints them, the fastest fused first."""
    chain = Chain(weights, m, by_table(False, m, weights) if m <= gemm_small.MAX_TOKENS else {})
    tried = [(chain.layer_us(), "split")]
    for tile in fused_tiles(m, weights.layers[0]["gate_up"].data):
        chain.fused = tile
        tried.append((chain.layer_us(), label(tile)))
    cells = [f"{text} {us:.1f}" for us, text in sorted(tried[1:])[:5]]
    print(f"{model} M={m}, us a layer: split {tried[0][0]:.1f} | " + " | ".join(cells), flush=True)
    return [{"model": model, "m": m, "product": "fused", "tile": text, "us": us} for us, text in tried]


def time_head(model: str, weights: Weights, m: int) -> list[dict[str, Any]]:
    """The output head by cuBLAS and by the wide kernel."""
    x = torch.randn(m, weights.shape.hidden, device="cuda", dtype=torch.bfloat16)
    found = []
    for name, linear in (("cublas", gemm_cuda.cublas), ("wide", gemm_cuda.wide)):
        def four(linear: Any = linear, head: LinearWeight = weights.head) -> None:
            for _ in range(4):
                linear(x, head, bias=None, out=None)

        found.append({"model": model, "m": m, "product": "head", "tile": name, "us": graph_us(four, 5) / 4})
    print(f"{model} M={m}, head: " + " | ".join(f"{row['tile']} {row['us']:.1f}" for row in found), flush=True)
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="check and time the fused gate, up and activation")
    parser.add_argument("--check", action="store_true", help="only check, in this process")
    parser.add_argument("--json", help="write every sample here")
    parser.add_argument("--seconds", type=float, default=80, help="start no further measurement after this long")
    parser.add_argument("--models", default="7b,1.5b,0.6b")
    parser.add_argument("--tokens", default="1,128,64,16,256,1024,32,8192,96")
    options = parser.parse_args()
    if options.check:
        return min(check(), 100)
    until = time.monotonic() + options.seconds
    if not checked():
        return 1
    pdl.enable_pdl(True)
    samples: list[dict[str, Any]] = []
    with torch.inference_mode():
        for model in options.models.split(","):
            weights = random_weights(SHAPES[model], False)
            for m in (int(text) for text in options.tokens.split(",")):
                if time.monotonic() > until:
                    print(f"out of time before {model} M={m}")
                    break
                samples += time_layer(model, weights, m)
                samples += time_head(model, weights, m) if 64 < m <= 1024 else []
            del weights
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(samples, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
