"""What was measured on a machine: the file, and that `table` answers by it. No GPU, no times but invented ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker_kernels.bench.tune import choose_tile, left_to_measure, parse_weight, rule, tune
from stoker_kernels.gemm import table
from stoker_kernels.gemm.small import Tile
from stoker_kernels.gemm.tuned import (
    LIMITS,
    GemmWeight,
    forget_tuned,
    read_tuned,
    tuned_file,
    use_tuned,
    write_tuned,
)
from stoker_kernels.gemm.wide import WideTile, tiles_for

GPU = "NVIDIA Nothing 141GB (SXM)"
WEIGHT = GemmWeight(7424, 2816, False, False)  # in no table
Chosen = Tile | WideTile | None


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STOKER_KERNEL_CACHE", str(tmp_path))
    table.best_tile.cache_clear()
    yield
    forget_tuned()
    table.best_tile.cache_clear()


def every(weight: GemmWeight, m: int) -> list[Chosen]:
    """Tiles that are compiled, of all kinds, for m tokens."""
    wide = tiles_for(weight.gated, weight.fp8, m)
    kernels = ("64x1", "64x2", "128x1") if m <= 64 else ("64x1", "128x1m1")
    texts = [f"{kernel}k{split}" for kernel in kernels for split in (2, 3, 4)]
    small: list[Chosen] = []
    if m <= (64 if weight.gated else 128) and not (weight.gated and weight.fp8):
        small += [table.named(text, weight.fp8, weight.gated, m) for text in texts]
    return [None, *small, *wide]


class Invented:
    """A weight whose tiles take invented times; one is wrong."""

    def __init__(self, weight: GemmWeight, seed: int) -> None:
        self.weight, self._random = weight, random.Random(seed)
        self.best: dict[int, Chosen] = {}
        self.wrongly_fast: dict[int, object] = {}

    def candidates(self, m: int) -> list[Chosen]:
        return every(self.weight, m)

    def wrong(self, m: int, tiles: list[Chosen]) -> dict[Chosen, str]:
        spared = (None, rule(self.weight, m))
        others = [tile for tile in tiles if tile not in spared]
        if not others:
            return {}
        found = self._random.choice(others)
        self.wrongly_fast[m] = found
        return {found: "NaN"}

    def timer(self, m: int):  # type: ignore[no-untyped-def]
        tiles = [tile for tile in every(self.weight, m) if tile != self.wrongly_fast.get(m, "none")]
        best = self.best[m] = self._random.choice(tiles)
        return lambda tile: 1.0 if tile == self.wrongly_fast.get(m, "none") else 9.0 if tile == best else 10.0


@pytest.mark.parametrize(("fp8", "gated"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_fastest_right_tile_is_kept_and_named_by_a_later_start(fp8: bool, gated: bool) -> None:
    weight = GemmWeight(9472, 3456, fp8, gated)
    bench, lines = Invented(weight, 4), list[str]()
    tune([weight], lambda _: bench, lambda one, tiles: write_tuned(GPU, {one: tiles}) and None, lines.append)
    assert sum(line.startswith("WRONG") for line in lines) == len(bench.wrongly_fast) > 2
    asked = table.gated_tile if gated else table.best_tile
    before = [asked(fp8, 9472, 3456, m) for m in (1, *LIMITS[1:])]
    assert before == [rule(weight, m) for m in (1, *LIMITS[1:])]
    table.best_tile.cache_clear()
    assert use_tuned(GPU) == {weight}
    for m, most in zip((1, *LIMITS[1:]), LIMITS, strict=True):
        assert asked(fp8, 9472, 3456, m) == bench.best[m]
        assert asked(fp8, 9472, 3456, most) == bench.best[m]
    assert asked(fp8, 9472, 3456, 1025) == rule(weight, 1025)
    assert asked(fp8, 9472, 3464, 16) == rule(GemmWeight(9472, 3464, fp8, gated), 16), "only what was measured"
    assert left_to_measure([weight, WEIGHT, WEIGHT], GPU) == [WEIGHT]


def test_whatever_the_rule_takes_can_be_kept() -> None:
    generator = random.Random(23)
    for _ in range(200):
        n, k = 64 * generator.randrange(4, 1200), 128 * generator.randrange(4, 200)
        weight = GemmWeight(n, k, generator.random() < 0.5, generator.random() < 0.5)
        for m, most in zip((1, *LIMITS[1:]), LIMITS, strict=True):
            ruled = rule(weight, m)
            text = "none" if ruled is None else table.text_of(ruled)
            assert table.named(text, weight.fp8, weight.gated, most) == ruled, (weight, m)


def test_what_is_hardly_faster_than_the_rule_does_not_replace_it() -> None:
    ruled, other = table.parse("64x1k2", 16), table.parse("128x1k2", 16)
    times = {ruled: 10.0, other: 9.95, None: 30.0}
    assert choose_tile(times, ruled, times.__getitem__) == (ruled, 10.0, 10.0)
    times[other] = 9.0
    assert choose_tile(times, ruled, times.__getitem__) == (other, 9.0, 10.0)
    shaky = iter((7.0, 10.0, 12.0, 10.0, 10.0, 12.0))  # a first look that was too good is looked at again
    assert choose_tile((other, ruled), ruled, lambda _: next(shaky))[1] == 7.0


def test_files_of_another_gpu_or_of_other_kernels_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    write_tuned(GPU, {WEIGHT: ("none",) * len(LIMITS)})
    assert read_tuned(GPU) == {WEIGHT: ("none",) * len(LIMITS)}
    assert read_tuned("NVIDIA Nothing 80GB") == {}
    monkeypatch.setattr("stoker_kernels.gemm.tuned.state_of_kernels", lambda: "0123456789ab")
    assert read_tuned(GPU) == {}


def broken(row: dict[str, object]) -> list[str]:
    good = {"gpu": GPU, "limits": list(LIMITS), "weights": [row]}
    tiles = row["tiles"]
    assert isinstance(tiles, list)
    rows = [
        {**row, "tiles": [*tiles[:4], text, *tiles[5:]]} for text in ("192x1k2", "64x1m9k1", "900t", "288rr", 7, "x")
    ]
    rows += [{**row, "tiles": tiles[:8]}, {**row, "n": "7424"}, {**row, "fp8": 1}, {"n": 1}]
    return [
        "", "{", "[]", "null", json.dumps({**good, "gpu": "another"}), json.dumps({**good, "limits": [8]}),
        *(json.dumps({**good, "weights": [each]}) for each in rows),
    ]  # fmt: skip


def test_a_broken_file_is_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    file = write_tuned(GPU, {WEIGHT: ("64x1k2",) * 5 + ("224t",) * 4})
    row = json.loads(file.read_text())["weights"][0]
    for text in broken(row):
        file.write_text(text)
        caplog.clear()
        assert use_tuned(GPU) == frozenset(), text
        assert str(file) in caplog.text, text
        assert table.best_tile(False, WEIGHT.n, WEIGHT.k, 64) == rule(WEIGHT, 64)
    write_tuned(GPU, {WEIGHT: ("none",) * len(LIMITS)})
    assert set(read_tuned(GPU)) == {WEIGHT}, "the next measurement replaces it"
    assert tuned_file(GPU).name.startswith("nvidia-nothing-141gb-sxm-")


def test_weights_of_the_command_line() -> None:
    assert parse_weight("7424x2816:bf16") == WEIGHT
    other = GemmWeight(512, 640, True, True)
    assert parse_weight("512x640:e4m3:gated") == other
    assert [parse_weight(str(each)) for each in (WEIGHT, other)] == [WEIGHT, other]
    for text in ("7424:bf16", "1x2:fp4", "1x2:bf16:else"):
        with pytest.raises(ValueError, match=r"weight|unpack"):
            parse_weight(text)


@pytest.mark.gpu
def test_a_weight_is_measured_on_this_gpu_and_its_products_are_right() -> None:
    import torch

    from stoker_kernels.bench.tune import tune_on_gpu
    from stoker_kernels.gemm import linear
    from stoker_kernels.quant import quantize_weight

    gpu, lines = torch.cuda.get_device_name(), list[str]()
    weights = [GemmWeight(1472, 1152, fp8, False) for fp8 in (False, True)]
    tune_on_gpu(weights, gpu, lines.append)
    assert not any(line.startswith("WRONG") for line in lines), lines
    assert use_tuned(gpu) == set(weights)
    values = torch.randn(1472, 1152, device="cuda", dtype=torch.bfloat16) * 0.03
    for kind in ("dense", "fp8_channel"):
        for m in (1, 7, 40, 100, 200, 700):
            x = torch.randn(m, 1152, device="cuda", dtype=torch.bfloat16)
            expected = x.float() @ values.float().T
            got = linear(x, quantize_weight(values, kind)).float()
            assert (got - expected).norm() < (0.01 if kind == "dense" else 0.06) * expected.norm()
