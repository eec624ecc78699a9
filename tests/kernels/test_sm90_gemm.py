"""The GEMM kernels with clusters, launched by their own host code and run on the CPU by `emulator/`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.kernels.emulator.build import compile_emulated, tensor_map

from stoker_kernels import cuda, gemm_gated, gemm_small, gemm_table, gemm_wide
from stoker_kernels.gemm_small import Operands, Tile, Workspace
from stoker_kernels.gemm_wide import Pairing, WideTile
from stoker_kernels.linear_weight import LinearWeight
from stoker_kernels.reference_gemm import linear_silu_mul

SOURCES = (
    *("sm90_bf16_gemm_gated.cu", "sm90_bf16_gemm_wide.cu", "sm90_gemm_cluster.cuh", "sm90_gemm_wide.cuh"),
    *("cluster_split.cuh", "gemm_epilogue.cuh", "sm90_chunk.cuh", "stream_k.cuh"),
)
BF16 = torch.bfloat16


class Launch(ctypes.Structure):
    """Launch of emulator/gemm.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("ctas", "cluster", "threads", "seed")),
        *(("x", ctypes.c_void_p), ("x_bytes", ctypes.c_int64), ("out", ctypes.c_void_p), ("out_bytes", ctypes.c_int64)),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiled = compile_emulated(SOURCES, "gemm.cpp", tmp_path_factory.mktemp("emulator"))
    assert compiled.cluster_arguments_size() == ctypes.sizeof(gemm_small._Arguments)
    assert compiled.wide_arguments_size() == ctypes.sizeof(gemm_wide._Arguments)
    return compiled


@dataclass
class Machine:
    """A device without a GPU: `resident` clusters at once, kernels from `library`."""

    library: ctypes.CDLL
    resident: int = 1
    seed: int = 0
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None
    clusters: int = 0
    ran: str = ""

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        assert arch == "sm_90a"
        assert name.startswith(stem)
        return cuda.Kernel(name, getattr(self.library, name), shared_bytes, threads)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert self.x is not None
        assert self.out is not None
        assert kernel.shared_bytes <= gemm_small.SHARED_LIMIT
        self.clusters, self.ran = grid // cluster, kernel.name
        spaces = [(t.data_ptr(), t.numel() * t.element_size()) for t in (self.x, self.out)]
        launch = Launch(grid, cluster, kernel.threads, self.seed, *spaces[0], *spaces[1])
        wide = "wide" in kernel.name
        run = self.library.run_wide_gemm if wide else self.library.run_cluster_gemm
        run(kernel.handle, *(ctypes.byref(item) for item in (*arguments, launch)))


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(library)
    caches = (gemm_wide._weight_map, gemm_small._weight_map)
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(cuda, "_encoded", tensor_map)
    monkeypatch.setattr(cuda, "kernel", made.kernel)
    monkeypatch.setattr(cuda, "launch", made.launch)
    monkeypatch.setattr(cuda, "resident_clusters", lambda *_: made.resident)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(
        gemm_small, "workspace", lambda _: Workspace(torch.empty(1), torch.zeros(1, dtype=torch.int32), 1)
    )
    yield made
    for each in caches:
        each.cache_clear()


def product(machine: Machine, tile: Tile | WideTile, m: int, n: int, k: int, resident: int = 1) -> torch.Tensor:
    """Runs a tile on random operands; checks every value and that nothing around the result is written."""
    generator = torch.Generator().manual_seed(m * n + k)
    x_space = torch.randn(m, k + 8, generator=generator).to(BF16)
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(BF16)
    columns = n // 2 if tile.gated else n
    out_space = torch.full((m + 3, columns + 24), float("nan"), dtype=BF16)
    x, out = x_space[:, :k], out_space[1 : m + 1, 8 : columns + 8]
    want = x.float() @ weight.float().T
    if tile.gated:
        gate, up = want.chunk(2, dim=1)
        want = gate * torch.sigmoid(gate) * up
    machine.x, machine.out, machine.resident = x_space, out_space, resident
    if isinstance(tile, WideTile):
        assert gemm_wide.refusal(tile, x, weight, out) is None
        gemm_wide.launch(tile, x, weight, out, pdl=True)
    else:
        assert gemm_small.refusal(Operands(x, weight, out)) is None
        gemm_small.launch(tile, Operands(x, weight, out), pdl=True)
    torch.testing.assert_close(out.float(), want, rtol=2.0**-8, atol=1e-4)
    result = out.clone()
    out.fill_(float("nan"))
    assert out_space.isnan().all()
    return result


def wide(rows: int, gated: bool) -> WideTile:
    return WideTile(rows, gated=gated)


@pytest.fixture(params=["by rows", "by tokens"])
def pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Deals every product in this way, whichever is faster."""

    def pairing(rows: int, n: int, m: int, pairs: int) -> Pairing:
        if request.param == "by rows":
            return Pairing(False, -(-n // (2 * rows)), -(-m // 128))
        return Pairing(True, -(-n // rows), -(-m // 256))

    monkeypatch.setattr(gemm_wide, "pairing", pairing)
    chosen: str = request.param
    return chosen


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("m", [65, 96, 127, 128, 129, 255, 300])
def test_wide_tiles_match_at_each_number_of_tokens(machine: Machine, pairs: str, m: int, gated: bool) -> None:
    # 1200 rows are 2 pairs of 576 and a tile of 48 rows, which its second CTA has none of.
    product(machine, wide(288, gated), m, 1200, 192, resident=2)


@pytest.mark.parametrize("rows", [256, 288])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (304, 128), (624, 320), (560, 3584)])
def test_wide_tiles_match_at_each_shape(machine: Machine, pairs: str, rows: int, gated: bool, n: int, k: int) -> None:
    product(machine, wide(rows, gated), 70, n, k)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("resident", "clusters"), [(1, 1), (4, 4), (5, 5), (66, 10)])
def test_clusters_take_tiles_in_turn(machine: Machine, pairs: str, gated: bool, resident: int, clusters: int) -> None:
    product(machine, wide(288, gated), 300, 1408, 256, resident)
    assert machine.clusters == min(clusters, 9 if pairs == "by rows" else 10)


def test_tokens_beyond_a_group_of_blocks_match(machine: Machine, pairs: str) -> None:
    product(machine, wide(256, False), 17 * 128 + 5, 640, 64, resident=3)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_changes_a_bit(machine: Machine, pairs: str, seed: int) -> None:
    plain = product(machine, wide(288, True), 200, 800, 448)
    machine.seed = seed + 1
    assert torch.equal(product(machine, wide(288, True), 200, 800, 448, resident=1 + seed), plain)


def test_a_token_has_the_same_bits_in_every_batch(machine: Machine, pairs: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(rows, 256, generator=generator).to(BF16) for rows in (150, 608))
    results = []
    for m in (65, 150):
        machine.x, machine.out = x[:m].clone(), torch.empty(m, 304, dtype=BF16)
        gemm_wide.launch(wide(288, True), machine.x, weight, machine.out, pdl=True)
        results.append(machine.out[:65])
    assert torch.equal(*results)


def cluster_tile(rows: int, chunks: int, tokens: int, cluster: int, gated: bool, stages: int = 3) -> Tile:
    return Tile("cluster", rows, chunks, tokens, stages, 1, cluster, gated)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize(("rows", "chunks"), [(64, 1), (64, 2), (128, 1)])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_gated_clusters_match(machine: Machine, rows: int, chunks: int, tokens: int, cluster: int) -> None:
    # 9 or 5 tiles of rows, the last one in part: with 2 CTAs or 4, whole tiles and a shared one.
    tile = cluster_tile(rows, chunks, tokens, cluster, gated=True)
    product(machine, tile, tokens - 3, 560, 832)
    product(machine, tile, 1, 16, 512)


@pytest.mark.parametrize(("tile", "m"), [((64, 1, 32, 2), 19), ((64, 2, 8, 3), 8), ((128, 1, 64, 4), 64)])
def test_plain_clusters_match(machine: Machine, tile: tuple[int, int, int, int], m: int) -> None:
    product(machine, cluster_tile(*tile, gated=False), m, 1112, 448, resident=2 if tile[3] == 2 else 1)


@pytest.mark.parametrize(("k", "stages"), [(64, 2), (2048, 2), (2048, 8)])
def test_gated_rings_of_each_length_match(machine: Machine, k: int, stages: int) -> None:
    product(machine, cluster_tile(64, 1, 16, 1, True, stages), 13, 192, k, resident=2)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_changes_a_bit_of_a_gated_cluster(machine: Machine, seed: int) -> None:
    tile = cluster_tile(64, 1, 32, 4, gated=True)
    plain = product(machine, tile, 30, 320, 640)
    machine.seed = seed + 1
    assert torch.equal(product(machine, tile, 30, 320, 640), plain)


@pytest.mark.parametrize("m", [1, 9, 33, 64, 65, 130])
def test_the_op_runs_the_tile_of_its_table(machine: Machine, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    monkeypatch.setattr(gemm_gated, "pdl_on", lambda _: True)
    monkeypatch.setattr(gemm_gated, "split", None)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, 512, generator=generator).to(BF16)
    weight = (torch.randn(624, 512, generator=generator) * 512**-0.5).to(BF16)
    machine.x, machine.out, machine.resident = x, torch.empty(0), 2
    got = gemm_gated.fused(x, LinearWeight(weight))
    torch.testing.assert_close(
        got, linear_silu_mul(x.float(), LinearWeight(weight.float())).to(BF16), rtol=0.01, atol=1e-3
    )
    kind = "wide_gated_n288" if m > gemm_table.GATED_SMALL else f"gated_n{gemm_table.gated_tile(624, 512, m).rows}"
    assert machine.ran.startswith(f"sm90_bf16_gemm_{kind}")
