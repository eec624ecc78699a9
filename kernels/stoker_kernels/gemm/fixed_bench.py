"""Checks and times the batch-invariant products of SM 9.0: `python -m stoker_kernels.gemm.fixed_bench`.

Bits first: every tile that may multiply a weight has to give a row the bits that the others give it, at any number of
tokens. Then each tile's time, cold and in a chain, beside the one that the rule takes and what `linear` or
`linear_silu_mul` take without the demand.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from stoker_kernels.gemm import fixed, gated, table, tiles
from stoker_kernels.gemm.bench import BANDWIDTH, MODELS, Weights, random_operands, timed
from stoker_kernels.gemm.choose import table as unbound
from stoker_kernels.gemm.small import MAX_TOKENS, Operands, Tile, token_tile
from stoker_kernels.gemm.wide import WideTile, wide_tiles
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import LinearWeight, Quantized

WEIGHTS = {
    **MODELS,
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "head": {"7b": (152064, 3584)},
}


def candidates(n: int, k_blocks: int, fp8: bool, gate_up: bool, m: int) -> Iterator[Tile | WideTile]:
    """Every tile for m tokens that keeps the weight's order of sums."""
    parts = 1 if gate_up else fixed.parts_of(n, k_blocks)
    if m <= (table.GATED_SMALL if gate_up else MAX_TOKENS):
        tokens = token_tile(m)
        for rows, chunks, ring in ((64, 1, "="), (64, 2, "="), (64, 1, ""), (128, 1, "="), (128, 1, "")):
            if chunks == 1 or parts == 1:
                yield from _cluster(f"{rows}x{chunks}k{parts}{ring}", tokens, gate_up)
        for rows in (64, 128) if m > fixed.STREAMED and not gate_up else ():
            for share in (1, 2, 4):
                for ring in ("-", "") if 2 <= share * parts <= table.MOST_CTAS else ():
                    yield table.parse(f"{rows}x1m{share}k{parts}{ring}", tokens)
    if m > fixed.STREAMED:
        yield from wide_tiles(gate_up, fp8, m, parts)


def _cluster(text: str, tokens: int, gate_up: bool) -> Iterator[Tile]:
    try:
        yield replace(table.parse(text, tokens), gated=gate_up, fixed=True)
    except ValueError:
        return  # no room for its ring


def check(cases: int, draw: random.Random) -> list[str]:
    """Random products, each by every tile; what is wrong, if anything."""
    complaints = []
    for case in range(cases):
        fp8, gate_up = case % 3 == 0, case % 3 == 1  # gate and up in bf16 alone
        n, k = 16 * draw.randrange(1, 900), (128 if fp8 else 64) * draw.randrange(1, 48)
        k_blocks = k * (1 if fp8 else 2) // 128
        o = random_operands(400, n, k, fp8, bias=not gate_up)
        width = n // 2 if gate_up else n
        want = torch.empty(400, width, dtype=torch.bfloat16, device="cuda")
        whole = next(iter(candidates(n, k_blocks, fp8, gate_up, 400)))
        tiles.launch(whole, replace(o, out=want), pdl=False)
        for m in (1, 8, 9, 16, draw.randint(17, 32), 33, draw.randint(34, 64), 65, draw.randint(66, 128), 129, 300):
            first = draw.randint(0, 400 - m)
            rows = slice(first, first + m)
            for tile in candidates(n, k_blocks, fp8, gate_up, m):
                out = torch.full((m, width), float("nan"), dtype=torch.bfloat16, device="cuda")
                scale = None if o.x_scale is None else o.x_scale[rows].clone()
                tiles.launch(tile, replace(o, x=o.x[rows].clone(), out=out, x_scale=scale), pdl=True)
                if not torch.equal(out, want[rows]):
                    wrong, named = int((out != want[rows]).sum()), table.text_of(tile)
                    complaints.append(f"{m} × {n} × {k}, {fp8=}, {gate_up=}, {named}: {wrong} of {out.numel()}")
    return complaints


def rows(model: str, fp8: bool, m: int) -> Iterator[str]:
    """A line for each weight of the model: every tile's µs, the rule's first."""
    for shape, (n, k) in WEIGHTS[model].items():
        gate_up = shape == "gate_up" and not fp8
        weights, k_blocks = Weights(n, k, fp8), k * (1 if fp8 else 2) // 128
        operands = weights.operands(m)
        if gate_up:
            out = torch.empty(m, n // 2, device="cuda", dtype=torch.bfloat16)
            operands = [replace(each, out=out) for each in operands]
        chosen = fixed.gated_tile_for(n, m) if gate_up else fixed.tile_for(n, k_blocks, fp8, m)
        times = {table.text_of(tile): timed(lambda o, t=tile: tiles.launch(t, o, pdl=True), operands)  # type: ignore[misc]
                 for tile in dict.fromkeys((chosen, *candidates(n, k_blocks, fp8, gate_up, m)))}  # fmt: skip
        usual = timed(_usual_gated if gate_up else _usual, operands)
        name = table.text_of(chosen)
        first = times.pop(name)
        best = "  ".join(f"{other} {us:.1f}" for other, us in sorted(times.items(), key=lambda item: item[1])[:6])
        yield (f"{model} {'fp8' if fp8 else 'bf16'} {n:6} × {k:5}  M = {m:5}  rule {name:>10} {first:7.1f} µs "
               f"usual {usual:7.1f}  limit {weights.limit_us(m):6.1f}  {best}")  # fmt: skip


def _weight(o: Operands) -> LinearWeight:
    return LinearWeight(o.weight, o.w_scale, "dense" if o.w_scale is None else "fp8_channel")


def _usual(o: Operands) -> None:
    unbound(o.x if o.x_scale is None else Quantized(o.x, o.x_scale), _weight(o), bias=None, out=o.out)


def _usual_gated(o: Operands) -> None:
    gated.fused(o.x, _weight(o))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="check and time the batch-invariant products")
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--models", default="7b,8b,0.6b,head")
    parser.add_argument("--tokens", default="1,16,32,64,128,256,1024")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--seed", type=int, default=random.randrange(2**20))
    options = parser.parse_args()
    complaints = check(options.cases, random.Random(options.seed))
    print(f"checked {options.cases} products, seed {options.seed}: {len(complaints)} wrong")
    if complaints:
        print("\n".join(complaints[:12]))
        return 1
    enable_pdl(True)
    print(f"{torch.cuda.get_device_name()}, {BANDWIDTH / 1e12:.2f} TB/s")
    for model in options.models.split(","):
        for m in options.tokens.split(","):
            for line in rows(model, options.fp8, int(m)):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
