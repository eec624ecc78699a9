import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from stoker_kernels.gemm import table
from stoker_kernels.gemm.small import TOKEN_TILES
from stoker_kernels.gemm.wide import wide_tiles
from stoker_kernels.launch import nvcc, wgmma_codegen
from stoker_kernels.quant import FP8


@pytest.fixture(scope="module")
def toolkit() -> Path:
    try:
        return nvcc.toolkit()
    except nvcc.NvccMissing as missing:
        pytest.skip(str(missing))


def test_header_is_what_the_generator_writes() -> None:
    assert wgmma_codegen.HEADER.read_text() == wgmma_codegen.header()


def test_every_source_is_a_target() -> None:
    named = {path.stem for path in nvcc.PACKAGE.rglob("*.cu")}
    assert {*nvcc.targets()} == named
    assert set(nvcc.targets().values()) == {"sm_90a"}


@pytest.mark.parametrize("stem", ["sm90_bf16_gemm_cluster", "sm90_e4m3_gemm_multicast"])
def test_kernels_compile_ahead_of_time(toolkit: Path, tmp_path: Path, stem: str) -> None:
    arch = nvcc.targets()[stem]
    remarks = nvcc.compile_cubin(stem, arch, tmp_path)
    assert "serialized" not in remarks
    names = function_names(tmp_path / nvcc.cubin_name(stem, arch))
    fp8 = "e4m3" in stem
    own = (table.own_tile(fp8, n, k, t)
           for n, k in (table.E4M3 if fp8 else table.BF16) for t in TOKEN_TILES)  # fmt: skip
    assert {tile.kernel_name(FP8 if fp8 else torch.bfloat16) for tile in own if stem.endswith(tile.family)} <= names


GATED_AND_WIDE = ("sm90_bf16_gemm_gated", *(f"sm90_{dtype}_gemm_{way}" for dtype in ("bf16", "e4m3")
                                            for way in ("wide", "fixed")))  # fmt: skip


def gated_and_wide_tiles() -> set[str]:
    """The names of the kernels that measured shapes choose, and of each size of a wide tile."""
    names = set()
    for dtype, measured in ((torch.bfloat16, table.GATED), (FP8, table.GATED_E4M3)):
        gated = (table.gated_tile(dtype == FP8, *shape, m) for shape in measured for m in (1, 16, 32, 64, 8192))
        wide = (tile for way in (False, True) for tile in wide_tiles(way, dtype == FP8, 1))
        fixed = (tile for parts in (1, 3) for tile in wide_tiles(False, dtype == FP8, 1, parts))
        names |= {tile.kernel_name(dtype) for tile in (*gated, *wide, *fixed) if tile is not None}
    return names


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize("stem", GATED_AND_WIDE)
def test_gated_and_wide_kernels_compile_without_spills(toolkit: Path, tmp_path: Path, stem: str) -> None:
    assert nvcc.compile_cubin(stem, "sm_90a", tmp_path) == ""
    mine = {name for name in gated_and_wide_tiles() if name.startswith(stem)}
    assert mine
    assert mine <= function_names(tmp_path / nvcc.cubin_name(stem, "sm_90a"))


def test_every_gated_and_wide_tile_is_of_a_source() -> None:
    assert [name for name in gated_and_wide_tiles() if not name.startswith(GATED_AND_WIDE)] == []


def test_a_compiler_error_is_shown(toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "an_op" / "csrc"
    folder.mkdir(parents=True)
    (folder / "broken.cu").write_text("__global__ void kernel() { undeclared(); }\n")
    monkeypatch.setattr(nvcc, "PACKAGE", tmp_path)
    with pytest.raises(RuntimeError, match="undeclared"):
        nvcc.compile_cubin("broken", "sm_80", tmp_path)
    assert list(tmp_path.glob("*.cubin")) == []


@pytest.fixture
def two_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two sources, of which `sm90_a` reads ptx.cuh by way of wgmma.cuh."""
    folder = tmp_path / "package" / "an_op" / "csrc"
    folder.mkdir(parents=True)
    (folder / "ptx.cuh").write_text("// common\n")
    (folder / "wgmma.cuh").write_text('#pragma once\n#include "ptx.cuh"\n#include <cuda.h>\n')
    (folder / "sm90_a.cu").write_text('#include "wgmma.cuh"\n')
    (folder / "sm90_b.cu").write_text("// alone\n")
    monkeypatch.setattr(nvcc, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(nvcc, "toolkit", lambda: Path())
    nvcc._digest.cache_clear()
    return folder


def test_a_cubin_of_other_sources_is_not_found_and_does_not_stay(
    two_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the files' times say: a copied tree has others."""
    compiled: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-o") + 1]).write_text("cubin")
        compiled.append(Path(command[-1]).stem)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(nvcc, "aot_folder", lambda: tmp_path / "aot")
    monkeypatch.setattr(nvcc, "cache", lambda: tmp_path / "cache")
    nvcc.build(tmp_path / "aot", 1)
    before = {path.name for path in (tmp_path / "aot").iterdir()}
    assert nvcc.missing(90) == []
    assert sorted(compiled) == ["sm90_a", "sm90_b"]
    (two_sources / "ptx.cuh").write_text("// another argument\n")
    os.utime(two_sources / "ptx.cuh", (0, 0))
    nvcc._digest.cache_clear()
    assert nvcc.missing(90) == ["sm90_a"]
    nvcc.build(tmp_path / "aot", 1)
    after = {path.name for path in (tmp_path / "aot").iterdir()}
    assert compiled[2:] == ["sm90_a"]
    assert len(after) == 2
    assert {name.split(".")[0] for name in before & after} == {"sm90_b"}


def function_names(cubin: Path) -> set[str]:
    """Kernel names in a cubin's section table."""
    return {name.decode() for name in re.findall(rb"\0\.text\.(\w+)\0", cubin.read_bytes())}
