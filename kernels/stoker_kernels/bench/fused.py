"""Checks and times gate, up and activation in one kernel: `python -m stoker_kernels.bench.fused [--json FILE]`.

First every fused and every wide tile against the definition, on fresh inputs into poisoned results, each family in a
process of its own under a time limit. Then the chain of a decode layer (`layer.Chain`) by cuBLAS, with two
kernels as `gemm/table.py` says, and with each fused one; and each product of the layer by itself: cuBLAS, the table's
tile, the wide ones. Prints the rows that `table.GATED` should have, or GATED_E4M3 (`--models 7b:fp8`).
Invariants: a family whose check failed is not timed; all weights together exceed L2 many times, so each is read cold.
Does not know: what the engine runs (by that table; `--kernel linear_silu_mul=split` makes it run two kernels).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from stoker_kernels.bench import layer
from stoker_kernels.bench.layer import SHAPES, Chain, Weights, by_table, random_weights
from stoker_kernels.gemm import choose, small, table, tiles, wide
from stoker_kernels.gemm.bench import BANDWIDTH, complaint, refused_cut
from stoker_kernels.gemm.reference import linear_fp64, silu_mul_fp64, sum_error
from stoker_kernels.gemm.small import Operands, Tile
from stoker_kernels.gemm.table import GATED_SMALL, GatedRow
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch import pdl
from stoker_kernels.quant import FP8, LinearWeight, Quantized, quantize_fp8, quantize_weight

CHECK_TOKENS = (1, 7, 8, 16, 33, 64, 65, 100, 128, 200, 300, 2200)
CHECK_SHAPES = ((18944, 3584), (8960, 1536), (3072, 1024), (520, 1152))  # F, K
CHECK_SECONDS = 60
# The cluster kernel, the wide one, and that without an activation.
FAMILIES = ("gated", "wide-gated", "wide", "wide-gated-e4m3", "wide-e4m3")
FP8_MODEL = ":fp8"  # behind a model's name
PEAK = 772e12  # bf16 operations a second that cuBLAS reaches on a cool H200; of e4m3 twice as many
REPEATS = 2  # of all layers' weights in a graph


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds of a product, or of a layer's chain (`product` "layer"), done in one way."""

    model: str
    m: int
    product: str
    n: int
    k: int
    way: str
    us: float


def fused_tiles(m: int, weight: torch.Tensor) -> list[Tile | WideTile]:
    """The fused tiles worth timing for m tokens."""
    fp8 = weight.dtype == FP8
    if m > GATED_SMALL:
        return [*wide.tiles_for(True, fp8, m)]
    if fp8:
        return []
    tokens = small.token_tile(m)
    texts = [f"{kernel}k{size}{ring}" for kernel in ("64x1", "64x2", "128x1") for size in (1, 2) for ring in ("", "=")]
    tiles = [replace(table.parse(text, tokens), gated=True) for text in texts]
    wide_ones = wide.tiles_for(True, False, m) if tokens == GATED_SMALL else []
    return [*(tile for tile in dict.fromkeys(tiles) if refused_cut(tile, weight) is None), *wide_ones]


def family_of(tile: Tile | WideTile, *, fp8: bool) -> str:
    """The family that a tile is checked with."""
    name = "gated" if isinstance(tile, Tile) else "wide-gated" if tile.gated else "wide"
    return f"{name}-e4m3" if fp8 else name


def label(tile: Tile | WideTile) -> str:
    """As `table.GATED` writes it."""
    return table.text_of(tile)


def check(
    family: str, shapes: Sequence[tuple[int, int]] = CHECK_SHAPES, tokens: Sequence[int] = CHECK_TOKENS
) -> int:
    """A family's tiles at every size, with and without dependent launch, twice for equal bits; how many are wrong."""
    torch.manual_seed(time.time_ns() % 2**31)
    right, wrong, fp8 = 0, 0, family.endswith("e4m3")
    for f, k in shapes:
        values = (torch.randn(2 * f, k, device=layer.DEVICE) * k**-0.5).bfloat16()
        weight = quantize_weight(values, "fp8_channel" if fp8 else "dense")
        for m in tokens:
            x = _random_tokens(m, k, fp8)
            plain = linear_fp64(x, weight), sum_error(x, weight)
            expected = {True: silu_mul_fp64(*plain), False: plain}
            ways = [*fused_tiles(m, weight.data), *(t for g in (True, False) for t in wide.wide_tiles(g, fp8, m))]
            for tile in (tile for tile in dict.fromkeys(ways) if family_of(tile, fp8=fp8) == family):
                found = _wrong(tile, x, weight, *expected[tile.gated])
                right, wrong = right + (found is None), wrong + (found is not None)
                if found is not None and wrong <= 12:
                    print(f"WRONG {family} {label(tile)} M={m} F={f} K={k}: {found}", flush=True)
    print(f"check {family}: {right} of {right + wrong} right", flush=True)
    return wrong


def _random_tokens(m: int, k: int, fp8: bool) -> torch.Tensor | Quantized:
    x = torch.randn(m, k, device=layer.DEVICE).bfloat16()
    return quantize_fp8(x) if fp8 else x


def _operands(x: torch.Tensor | Quantized, weight: LinearWeight, out: torch.Tensor) -> Operands:
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    return Operands(data, weight.data, out, None, weight.scale, scale)


def _wrong(
    tile: Tile | WideTile,
    x: torch.Tensor | Quantized,
    weight: LinearWeight,
    expected: torch.Tensor,
    error: torch.Tensor,
) -> str | None:
    first = None
    for dependent in (False, True, True):
        out = torch.full(expected.shape, float("nan"), device=expected.device, dtype=torch.bfloat16)
        tiles.launch(tile, _operands(x, weight, out), pdl=dependent)
        if out.is_cuda:
            torch.cuda.synchronize()
        found = complaint(out, expected, error)
        if found is not None:
            return f"pdl={dependent}: {found}"
        if first is not None and not torch.equal(first, out):
            return "not the same bits twice"
        first = out
    return None


def passes(family: str) -> bool:
    """`check` in a process of its own, so that a kernel that hangs or faults takes nothing with it."""
    process = subprocess.Popen([sys.executable, "-m", "stoker_kernels.bench.fused", "--check", family])
    try:
        return process.wait(CHECK_SECONDS) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"check {family}: HUNG for {CHECK_SECONDS} s", flush=True)
        return False


def limit_us(m: int, n: int, k: int, size: int) -> float:
    """The larger of the weight's bytes, `size` a value, and the product's operations, in microseconds."""
    return max(size * n * k / BANDWIDTH, m * size * n * k / PEAK) * 1e6


def time_layer(model: str, weights: Weights, m: int, families: Sequence[str]) -> list[Sample]:
    """The chain by cuBLAS, with two kernels and with each fused tile; prints them, the fastest fused first."""
    n, k = weights.products()["gate_up"]
    tried = [("cublas", Chain(weights, m).layer_us())]
    chain = Chain(weights, m, by_table(weights.fp8, m, weights))
    tried.append(("split", chain.layer_us() if any(chain.tiles.values()) else tried[0][1]))
    for tile in fused_tiles(m, weights.layers[0]["gate_up"].data):
        if family_of(tile, fp8=weights.fp8) not in families:
            continue
        chain.fused = tile
        tried.append((label(tile), chain.layer_us()))
    size = weights.layers[0]["gate_up"].data.element_size()
    limit = sum(limit_us(m, *shape, size) for shape in weights.products().values())
    fused = sorted(tried[2:], key=lambda way: way[1])
    cells = [f"{way} {us:.1f}" for way, us in (*tried[:2], *fused[:5])]
    print(f"{model} M={m}, us a layer: limit {limit:.1f} | " + " | ".join(cells), flush=True)
    return [Sample(model, m, "layer", n, k, way, us) for way, us in tried]


def time_products(model: str, weights: Weights, m: int, families: Sequence[str]) -> list[Sample]:
    """Each product by itself: cuBLAS, the table's tile, the wide tiles; prints them."""
    found = []
    for name, every in {**{name: [products[name] for products in weights.layers] for name in weights.products()},
                        "head": [weights.head]}.items():  # fmt: skip
        (n, k), fp8 = every[0].data.shape, every[0].kind != "dense"
        x = _random_tokens(m, k, fp8)
        ways: list[tuple[str, Callable[[LinearWeight, torch.Tensor], object]]] = [("cublas", _cublas(x))]
        tile = table.best_tile(fp8, n, k, m)
        if isinstance(tile, Tile):
            ways.append(("table", _own(tile, x)))
        plain = [tile for tile in wide.tiles_for(False, fp8, m) if family_of(tile, fp8=fp8) in families]
        ways += [(label(tile), _own(tile, x)) for tile in plain]
        samples = [Sample(model, m, name, n, k, way, _each_us(run, every, m)) for way, run in ways]
        limit = limit_us(m, n, k, every[0].data.element_size())
        cells = " | ".join(f"{sample.way} {sample.us:.1f}" for sample in samples)
        print(f"{model} M={m}, {name}: limit {limit:.1f} | {cells}", flush=True)
        found += samples
    return found


def _cublas(x: torch.Tensor | Quantized) -> Callable[[LinearWeight, torch.Tensor], object]:
    return lambda weight, out: choose.cublas(x, weight, bias=None, out=out)


def _own(tile: Tile | WideTile, x: torch.Tensor | Quantized) -> Callable[[LinearWeight, torch.Tensor], object]:
    return lambda weight, out: tiles.launch(tile, _operands(x, weight, out), pdl=True)


def _each_us(run: Callable[[LinearWeight, torch.Tensor], object], every: Sequence[LinearWeight], m: int) -> float:
    out = torch.empty(m, every[0].out_features, device=layer.DEVICE, dtype=torch.bfloat16)

    def body() -> None:
        for weight in [*every] * REPEATS:
            run(weight, out)

    return layer.graph_us(body, 7) / (len(every) * REPEATS)


def rows_of_table(samples: Sequence[Sample], *, fp8: bool) -> dict[tuple[int, int], GatedRow]:
    """What `table.GATED`, or GATED_E4M3, should hold by the layers' times.

    What was not timed keeps its row's text. None, for two kernels, stands also where no fused tile passed its check.
    """
    samples, rows = [s for s in samples if s.model.endswith(FP8_MODEL) == fp8], {}
    for shape in dict.fromkeys((s.n, s.k) for s in samples if s.product == "layer"):
        of_shape = [s for s in samples if s.product == "layer" and (s.n, s.k) == shape]
        # The slowest first, so that the fastest of a number of tokens stays.
        best = {s.m: s.way for s in sorted(of_shape, key=lambda s: (s.m, -s.us))}
        texts = {m: None if way in ("cublas", "split") else way for m, way in best.items()}
        now = table.nearest_gated(fp8, *shape)
        tiles = list(now.tiles)
        for m, text in texts.items():
            if m <= GATED_SMALL:
                tiles[small.TOKEN_TILES.index(small.token_tile(m))] = text
        wide = [(m, text) for m, text in texts.items() if m > GATED_SMALL]
        ends = [one for one, after in zip(wide, [*wide[1:], None], strict=True) if after is None or after[1] != one[1]]
        rows[shape] = GatedRow(tuple(tiles), tuple(ends) or now.wide)  # type: ignore[arg-type]
    return rows


def row_text(shape: tuple[int, int], row: GatedRow) -> str:
    """One line of `table.GATED`."""
    return f"    {shape}: GatedRow({row.tiles!r}, {row.wide!r}),".replace("'", '"')


def measure(models: Sequence[str], tokens: Sequence[int], families: Sequence[str], until: float) -> list[Sample]:
    """Every way for each model and number of tokens until the clock says `until`; prints as it goes."""
    samples: list[Sample] = []
    for model in models:
        weights = random_weights(SHAPES[model.removesuffix(FP8_MODEL)], model.endswith(FP8_MODEL))
        for m in tokens:
            if time.monotonic() > until:
                print(f"out of time before {model} M={m}")
                break
            samples += time_layer(model, weights, m, families)
            samples += time_products(model, weights, m, families)
        del weights
        torch.cuda.empty_cache()
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="check and time the fused gate, up and activation")
    parser.add_argument("--check", choices=FAMILIES, help="only check this family, in this process")
    parser.add_argument("--json", help="write every sample here")
    parser.add_argument("--seconds", type=float, default=120, help="start no further measurement after this long")
    parser.add_argument("--models", default="7b,1.5b,0.6b", help=f"of {', '.join(SHAPES)}; 7b:fp8")
    parser.add_argument("--tokens", default="1,128,64,16,256,1024,32,512,8192,96")
    options = parser.parse_args(argv)
    models, tokens = options.models.split(","), [int(text) for text in options.tokens.split(",")]
    unknown = [model for model in models if model.removesuffix(FP8_MODEL) not in SHAPES]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if options.check:
        return min(check(options.check), 100)
    families = [family for family in FAMILIES if passes(family)]
    until = time.monotonic() + options.seconds
    pdl.enable_pdl(True)
    with torch.inference_mode():
        samples = measure(models, tokens, families, until)
    for fp8, name in ((False, "GATED"), (True, "GATED_E4M3")):
        rows = rows_of_table(samples, fp8=fp8)
        if rows:
            print(f"table.{name}:", *(row_text(*each) for each in rows.items()), sep="\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([{name: getattr(sample, name) for name in Sample.__slots__} for sample in samples], file)
    return 0 if len(families) == len(FAMILIES) else 1


if __name__ == "__main__":
    sys.exit(main())
