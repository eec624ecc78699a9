"""What a start does about kernels that did not come with the package."""

from __future__ import annotations

import io
import logging
import random
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from stoker_kernels.gemm import GemmWeight
from stoker_kernels.launch import at_need, nvcc, rehearsal
from stoker_kernels.launch.aot_index import Wanted
from stoker_kernels.launch.at_need import CompileFailed
from stoker_kernels.launch.dispatch import KernelUnavailable, Target
from stoker_kernels.launch.rehearsal import Missing
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, KernelUnavailableError
from stoker_runtime.executor import kernel_supply
from stoker_runtime.executor.kernel_supply import BuildProgress, gemm_weights, supply_cuda, supply_tiles, supply_triton
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.quantized_head import with_head
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU of SM 9.0 without one CUDA kernel; the folder is where they would be built."""
    monkeypatch.setattr(kernel_supply, "sm_of", lambda device: 90)
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(nvcc, "cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_without_nvcc_the_log_says_what_is_slower_and_the_command(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    supply_cuda(GPU)
    assert "sm90_decode" in caplog.text
    assert "slower" in caplog.text
    assert "pip install 'stoker[build]'" in caplog.text
    assert not hopper.exists()


def test_with_nvcc_they_are_built_into_the_cache_once(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def compile_cubin(stem: str, arch: str, out: Path) -> str:
        built.append(stem)
        (out / nvcc.cubin_name(stem, arch)).touch()
        return ""

    monkeypatch.setattr(nvcc, "toolkit", lambda: Path())
    monkeypatch.setattr(nvcc, "compile_cubin", compile_cubin)
    supply_cuda(GPU)
    assert sorted(built) == sorted(nvcc.targets())
    assert len(list(hopper.iterdir())) == len(built) > 5
    supply_cuda(GPU)
    assert len(built) == len(nvcc.targets()), "found in the cache"


def test_a_source_that_does_not_compile_is_said(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(stem: str, arch: str, out: Path) -> str:
        raise RuntimeError(f"nvcc failed for {stem}")

    monkeypatch.setattr(nvcc, "toolkit", lambda: Path())
    monkeypatch.setattr(nvcc, "compile_cubin", fails)
    supply_cuda(GPU)
    assert "nvcc failed for sm90_" in caplog.text
    assert "slower" in caplog.text


def test_nvcc_without_a_preprocessor_is_said(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(hopper))
    supply_cuda(GPU)
    assert "apt-get install g++" in caplog.text


@pytest.mark.parametrize(("device", "sm"), [("cpu", 0), ("cuda", 80)])
def test_nothing_is_said_where_none_are_made_for_the_device(
    device: str, sm: int, hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_supply, "sm_of", lambda device: sm)
    caplog.set_level(logging.INFO)
    supply_cuda(torch.device(device))
    assert caplog.text == ""


def test_turing_is_told_that_it_has_no_tensor_cores_here(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_supply, "sm_of", lambda device: 75)
    supply_cuda(GPU)
    assert "sm_75: Triton multiplies here without tensor cores" in caplog.text


class Machine:
    """Steps that launch some kernels, and a compiler."""

    def __init__(self, missing: int, *, works: bool = True) -> None:
        self.left = [Missing(None, Wanted(f"kernel_{at}", "", {}, {}, {}), 90, "none came") for at in range(missing)]
        self.rehearsals, self.told = 0, (0, 1)
        self.works = works

    def steps(self) -> None:
        assert rehearsal.rehearsing()
        self.rehearsals += 1
        for each in self.left:
            rehearsal.note_missing(each)

    def compile(
        self, missing: Iterable[Missing], report: Callable[[int, int, str], None], *, index: int, among: int
    ) -> None:
        assert not rehearsal.rehearsing()
        self.told = (index, among)
        wanted = list(missing)
        for at, each in enumerate(wanted, 1):
            report(at, len(wanted), each.wanted.kernel)
        if self.works:
            self.left = []


@pytest.mark.parametrize("missing", [0, 3])
def test_what_a_rehearsal_misses_is_compiled_before_the_first_step(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(missing)
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path))
    monkeypatch.setattr(at_need, "compile_missing", machine.compile)
    caplog.set_level(logging.INFO)
    supply_triton(machine.steps, index=2, among=5)
    assert machine.rehearsals == (2 if missing else 1)
    assert machine.told == ((2, 5) if missing else (0, 1))
    assert ("3 of 3 after" in caplog.text) == bool(missing)
    command = "none came compiled for sm_90; python -m stoker_kernels.launch.aot --sm 90"
    for words in ("once: kernel_0, kernel_1, kernel_2", command):
        assert (words in caplog.text) == bool(missing)


def test_a_kernel_that_does_not_compile_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise CompileFailed("decode_kernel does not compile for sm_90: too large")

    monkeypatch.setattr(at_need, "compile_missing", fails)
    with pytest.raises(KernelUnavailableError, match="decode_kernel does not compile"):
        supply_triton(Machine(1).steps)


def test_one_that_is_missing_still_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1, works=False)
    monkeypatch.setattr(at_need, "compile_missing", machine.compile)
    with pytest.raises(KernelUnavailableError, match=r"still missing: .*kernel_0"):
        supply_triton(machine.steps)


def test_an_op_without_a_kernel_ends_the_start() -> None:
    def steps() -> None:
        raise KernelUnavailable("rms_norm", Target("cuda", 70, torch.bfloat16), {"triton": "needs sm_75"})

    with pytest.raises(KernelUnavailableError, match="rms_norm"):
        supply_triton(steps)
    assert not rehearsal.rehearsing()


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    show = BuildProgress("compiling")
    show(1, 2, "norm")
    show(2, 2, "rope")
    first, last = screen.getvalue().split("\r")[1:]
    assert first.startswith("compiling [###############...............] 1/2 norm")
    assert last.startswith("compiling [##############################] 2/2 rope")
    assert last.endswith("\n")


def test_the_weights_of_a_model_are_those_that_its_products_read() -> None:
    llama = build_spec(read_source("shape:llama-3.1-8b"))
    sizes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    plain = [GemmWeight(n, k, False, False) for n, k in sizes]
    both = GemmWeight(28672, 4096, False, True)
    assert gemm_weights(llama, "bfloat16", "none") == [*plain[:3], both, *plain[3:]]
    eights = gemm_weights(with_head(llama, "fp8"), "bfloat16", "fp8")
    assert {each.fp8 for each in eights} == {True}
    assert {(each.n, each.k) for each in eights} == set(sizes)
    assert gemm_weights(llama, "float16", "none") == gemm_weights(llama, "bfloat16", "w4")[:-1] == []
    cut = gemm_weights(split_spec(llama, places(4, 1)[0]), "bfloat16", "none")
    assert [(each.n, each.k) for each in cut] == [
        (1536, 4096),
        (4096, 1024),
        (7168, 4096),
        (7168, 4096),
        (4096, 3584),
        (32064, 4096),
    ]
    tied = build_spec(read_source("shape:qwen3-0.6b"))
    assert GemmWeight(tied.vocab, tied.hidden, False, False) in gemm_weights(tied, "bfloat16", "none")


class Started:
    """Stands in for `subprocess.run`: what was started, and how it ends."""

    def __init__(self, status: int) -> None:
        self.programs: list[list[str]] = []
        self.status = status

    def __call__(self, program: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.programs.append(program)
        return subprocess.CompletedProcess(program, self.status, "7424x2816:bf16: 1: 1.31x\n", "CUDA error: fern\n")


@pytest.mark.parametrize("status", [0, 1])
def test_a_start_measures_what_is_not_known_by_a_process_of_its_own(
    status: int, hopper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STOKER_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA Test {status}")
    started = Started(status)
    monkeypatch.setattr(subprocess, "run", started)
    weights = [GemmWeight(64 * random.randrange(40, 90), 2816, False, gated) for gated in (False, True)]
    with caplog.at_level(logging.INFO):
        supply_tiles(GPU, weights, tune=False)
        assert started.programs == []
        assert "2 weights go by the rule; stoker tune MODEL measures them" in caplog.text
        supply_tiles(GPU, weights, tune=True)
    assert started.programs[0][-2:] == list(map(str, weights))
    assert "7424x2816:bf16: 1: 1.31x" in caplog.text
    assert ("CUDA error: fern" in caplog.text) == bool(status)


def test_where_there_is_nothing_to_measure_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        supply_tiles(torch.device("cpu"), [], tune=False)
        assert caplog.text == ""
        supply_tiles(torch.device("cpu"), [], tune=True)
    assert "--tune has nothing to measure here" in caplog.text
    with pytest.raises(ConfigError, match="run stoker tune"):
        EngineConfig("shape:tiny", tune=True, tensor_parallel_size=2).validate()
