"""`bench.fused` without a GPU: its checks and its chain on the emulator, its tables on invented times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import matrix
from tests.kernels.emulator.gemm import GemmMachine

from stoker_kernels.bench import fused, layer
from stoker_kernels.bench.fused import Sample, check, limit_us, main, row_text, rows_of_table
from stoker_kernels.bench.layer import Chain, Shape, random_weights
from stoker_kernels.gemm import choose, table, tiles
from stoker_kernels.gemm.reference import linear
from stoker_kernels.gemm.small import Operands
from stoker_kernels.gemm.table import GatedRow
from stoker_kernels.gemm.wide import PLAIN_ROWS, WideTile
from stoker_kernels.quant import LinearWeight, Quantized

TINY = Shape(hidden=128, intermediate=160, heads=1, kv_heads=1, vocab=48, layers=1)


@pytest.fixture
def on_cpu(machine: GemmMachine, monkeypatch: pytest.MonkeyPatch) -> GemmMachine:
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    monkeypatch.setitem(layer.SHAPES, "tiny", TINY)
    monkeypatch.setattr(table, "best_tile", lambda *_: None)
    machine.resident = 2
    return machine


TILES = {"gated": 10, "wide-gated": 60, "wide": 16, "wide-gated-e4m3": 42, "wide-e4m3": 24}


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize("family", fused.FAMILIES)
def test_every_tile_passes_the_check(family: str, on_cpu: GemmMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(family, [(40, 128)], [5, 70, 140]) == 0
    assert f"check {family}: {TILES[family]} of {TILES[family]} right" in capsys.readouterr().out


def test_a_wrong_tile_is_named(
    on_cpu: GemmMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(tile: WideTile, o: Operands, *, pdl: bool) -> None:
        plain = o.x.float() @ o.weight.float().T
        gate, up = plain.chunk(2, dim=1)
        o.out.copy_(torch.nn.functional.silu(gate) * up if tile.gated else plain)
        if tile.rows == 288:
            o.out[3] = float("nan")

    monkeypatch.setattr(tiles, "launch", launch)
    assert check("wide-gated", [(40, 128)], [70]) == 3
    said = capsys.readouterr().out
    assert "WRONG wide-gated 288r M=70 F=40 K=128" in said
    assert "WRONG wide-gated 288tm64 M=70 F=40 K=128" in said
    assert "check wide-gated: 16 of 19 right" in said


def test_a_family_that_fails_its_check_is_not_timed(
    on_cpu: GemmMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused, "passes", lambda family: family == "gated")
    monkeypatch.setattr(layer, "graph_us", lambda body, replays: 20.0)
    monkeypatch.setattr(fused.pdl, "enable_pdl", lambda _: None)
    assert main(["--models", "tiny", "--tokens", "16,70"]) == 1
    said = capsys.readouterr().out
    assert "64x1k1" in said
    assert "288r" not in said


@pytest.mark.parametrize(("fp8", "near"), [(False, 0.01), (True, 0.05)], ids=["bf16", "e4m3"])
def test_the_chain_is_the_same_fused_and_not(
    on_cpu: GemmMachine, monkeypatch: pytest.MonkeyPatch, fp8: bool, near: float
) -> None:
    def scaled(
        x: torch.Tensor, x_scale: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        return linear(Quantized(x, x_scale), weight, bias=bias, out=out)

    monkeypatch.setattr(choose, "_scaled", scaled)
    torch.manual_seed(1)
    weights = random_weights(TINY, fp8)
    chains = [Chain(weights, 70) for _ in range(2)]
    chains[1].residual.copy_(chains[0].residual)
    chains[1].fused = WideTile(288, gated=True)
    start = torch.randn(70, 128).bfloat16()
    plain, fused = (chain.layer(start, weights.layers[0]) for chain in chains)
    assert on_cpu.ran == f"sm90_{'e4m3' if fp8 else 'bf16'}_gemm_wide_gated_n288"
    assert (fused - plain).float().norm() < near * plain.float().norm()


def test_one_command_checks_times_and_prints(
    on_cpu: GemmMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    checked = matrix.drawn(pytestconfig, fused.FAMILIES, 1)

    def timed(body: Callable[[], None], replays: int) -> float:
        on_cpu.ran = ""
        body()
        return 10.0 if "gated" in on_cpu.ran else 20.0

    monkeypatch.setattr(fused, "passes", lambda family: family not in checked or check(family, [(40, 128)], [9]) == 0)
    monkeypatch.setattr(layer, "graph_us", timed)
    monkeypatch.setattr(fused, "REPEATS", 1)
    monkeypatch.setattr(fused.pdl, "enable_pdl", lambda _: None)
    out = tmp_path / "samples.json"
    assert main(["--models", "tiny", "--tokens", "3,130", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "tiny M=3, us a layer: limit 0.1 | cublas 10.0 | split 10.0 | 64x1k1 5.0" in said
    assert "tiny M=130, gate_up: limit" in said
    assert said.rstrip().splitlines()[-1].startswith("    (320, 128): GatedRow((")
    samples = [Sample(**entry) for entry in json.loads(out.read_text())]
    assert {s.product for s in samples} == {"layer", "qkv", "o", "gate_up", "down", "head"}
    assert {s.way for s in samples if s.product == "down" and s.m == 130} == {
        "cublas",
        *(f"{rows}{way}" for rows in PLAIN_ROWS for way in "rt"),
    }


def test_a_model_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--models", "7b,9b"])
    assert "no model 9b" in capsys.readouterr().err


def timed_layer(m: int, **ways: float) -> list[Sample]:
    return [Sample("7b", m, "layer", 37888, 3584, way.replace("_", "="), us) for way, us in ways.items()]


def test_the_table_takes_the_fastest_way_of_each_size() -> None:
    samples = [
        *timed_layer(1, cublas=140.0, split=122.0, **{"64x1k2": 121.0, "64x1k2_": 120.0}),
        *timed_layer(64, cublas=146.0, split=141.0, **{"64x1k2": 142.0}),
        *timed_layer(1024, cublas=900.0, split=900.0, **{"288t": 901.0, "256t": 905.0}),
        *timed_layer(128, cublas=155.0, split=153.0, **{"288r": 147.0, "256r": 150.0}),
        *timed_layer(256, cublas=255.0, split=255.0, **{"288r": 250.0, "288t": 251.0}),
        *timed_layer(8192, cublas=7000.0, split=7000.0, **{"288t": 6900.0, "256t": 6950.0}),
    ]
    rows = rows_of_table(samples, fp8=False)
    assert rows_of_table(samples, fp8=True) == {}
    now = table.GATED[(37888, 3584)].tiles
    row = GatedRow(("64x1k2=", now[1], now[2], None), ((256, "288r"), (1024, None), (8192, "288t")))
    assert rows == {(37888, 3584): row}
    text = row_text((37888, 3584), row)
    key, _, value = text.strip().rstrip(",").partition(": ")
    assert eval(key) == (37888, 3584)
    assert eval(value) == row


def test_the_limit_is_bytes_then_operations() -> None:
    assert limit_us(1, 37888, 3584, 2) == pytest.approx(62.7, abs=0.1)
    assert limit_us(1024, 37888, 3584, 2) == pytest.approx(360.2, abs=0.1)
    assert limit_us(1024, 37888, 3584, 1) == pytest.approx(180.1, abs=0.1)
