"""Measures the tiles of given weights on this GPU and keeps the fastest: what `stoker tune` runs.

    python -m stoker_kernels.bench.tune 6144x4096:bf16 28672x4096:bf16:gated

Each weight is timed as `sweep` does it, behind a norm, at the most tokens that a tile is for (one token for the first).
What is within WORTH of the rule's own choice is not taken for better; the best of a first look, and the rule's choice,
are timed again before one is named.
Invariants: a tile whose product is wrong is never named; what was measured is kept after each weight, so that a run
that is cut short has not been for nothing.
Does not know: models. `choose_tile` and `tune` know no GPU: they are given a bench.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from stoker_kernels.gemm import table
from stoker_kernels.gemm.tiles import AnyTile
from stoker_kernels.gemm.tuned import CUBLAS, LIMITS, GemmWeight, Tiles, read_tuned, write_tuned

ChosenTile = AnyTile | None

MEASURED_AT = (1, *LIMITS[1:])
"""Tokens at which each of LIMITS is measured: up to 8 it is bytes alone, and one token is what is asked for most."""
CHECKED_UP_TO = 256
WORTH = 0.01
FINALISTS = 3


class WeightBench(Protocol):
    """A weight on a GPU: `sweep.Bench`."""

    def candidates(self, m: int) -> Sequence[ChosenTile]:
        """None, and every tile worth timing."""
        ...

    def wrong(self, m: int, tiles: list[ChosenTile]) -> dict[ChosenTile, str]:
        """What is wrong with each tile's product."""
        ...

    def timer(self, m: int) -> Callable[[ChosenTile], float]:
        """Microseconds of a product, by tile."""
        ...


def rule(weight: GemmWeight, m: int) -> ChosenTile:
    """What would be taken without a measurement."""
    return (table.rule_gated if weight.gated else table.rule_tile)(weight.fp8, weight.n, weight.k, m)


def choose_tile(
    candidates: Iterable[ChosenTile], ruled: ChosenTile, us: Callable[[ChosenTile], float]
) -> tuple[ChosenTile, float, float]:
    """The fastest candidate → it, its microseconds and those of `ruled`, which stays unless it is WORTH slower."""
    times = {tile: us(tile) for tile in dict.fromkeys((*candidates, ruled))}
    final = dict.fromkeys((*sorted(times, key=times.__getitem__)[:FINALISTS], ruled))
    again = {tile: min(times[tile], us(tile)) for tile in final}
    best = min(again, key=again.__getitem__)
    if again[ruled] <= again[best] * (1 + WORTH):
        best = ruled
    return best, again[best], again[ruled]


def tune(
    weights: Iterable[GemmWeight],
    open_bench: Callable[[GemmWeight], WeightBench],
    keep: Callable[[GemmWeight, Tiles], None],
    say: Callable[[str], None],
) -> None:
    """Measure each weight and `keep` its tiles; `say` a line of each."""
    for weight in weights:
        began, texts, gains = time.monotonic(), [], []
        bench = open_bench(weight)
        for m, most in zip(MEASURED_AT, LIMITS, strict=True):
            ruled = rule(weight, m)
            tiles = [tile for tile in bench.candidates(m) if _can_be_named(weight, tile, most)]
            wrong = bench.wrong(m, [*tiles, ruled]) if m <= CHECKED_UP_TO else {}
            for tile, why in wrong.items():
                say(f"WRONG {weight}, {m} tokens, {tile}: {why}")
            right = [tile for tile in tiles if tile not in wrong]
            best, us, before = choose_tile(right, None if ruled in wrong else ruled, bench.timer(m))
            texts.append(CUBLAS if best is None else table.text_of(best))
            gains.append(f"{m}: {before / us:.2f}x")
        keep(weight, tuple(texts))
        say(f"{weight}: {', '.join(gains)} of the rule's speed, in {time.monotonic() - began:.1f} s")


def _can_be_named(weight: GemmWeight, tile: ChosenTile, most: int) -> bool:
    """Whether a file may name this tile for up to `most` tokens."""
    if tile is None:
        return True
    try:
        return table.named(table.text_of(tile), weight.fp8, weight.gated, most) == tile
    except ValueError:
        return False


def tune_on_gpu(weights: Iterable[GemmWeight], gpu: str, say: Callable[[str], None]) -> None:
    """`tune` on the current device, whose name is `gpu`, into its file. Raises OSError where that cannot be written."""
    import torch

    from stoker_kernels.bench.sweep import Bench
    from stoker_kernels.launch import pdl

    def open_bench(weight: GemmWeight) -> WeightBench:
        torch.cuda.empty_cache()
        return Bench(weight)

    def keep(weight: GemmWeight, tiles: Tiles) -> None:
        write_tuned(gpu, {weight: tiles})

    pdl.enable_pdl(True)
    with torch.inference_mode():
        tune(weights, open_bench, keep, say)


def left_to_measure(weights: Iterable[GemmWeight], gpu: str) -> list[GemmWeight]:
    """Those of which the file of this GPU does not know yet."""
    known = read_tuned(gpu)
    return [weight for weight in dict.fromkeys(weights) if weight not in known]


def parse_weight(text: str) -> GemmWeight:
    """`NxK:bf16`, `NxK:e4m3`, and `:gated` behind it. Raises ValueError."""
    size, dtype, *more = text.split(":")
    n, k = (int(each) for each in size.split("x"))
    if dtype not in ("bf16", "e4m3") or more not in ([], ["gated"]):
        raise ValueError(f"{text!r} is no weight: NxK:bf16 or NxK:e4m3, and :gated behind it")
    return GemmWeight(n, k, dtype == "e4m3", bool(more))


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    import torch

    parser = argparse.ArgumentParser(description="measure the tiles of weights and keep the fastest")
    parser.add_argument("weights", nargs="+", type=parse_weight, metavar="NxK:DTYPE[:gated]")
    parser.add_argument("--again", action="store_true", help="measure what is known already, too")
    options = parser.parse_args(argv)
    gpu = torch.cuda.get_device_name()
    tune_on_gpu(options.weights if options.again else left_to_measure(options.weights, gpu), gpu, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
