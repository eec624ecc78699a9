"""Where a kernel test runs.

Files named `test_*on_device.py` hold the tests of Triton kernels against their references, written once: on a GPU
machine they run on the GPU, marked `gpu` as all that does, under TRITON_INTERPRET=1 on the CPU in Triton's
interpreter. Triton decides at import whether it interprets, so `test_interpreter.py` runs each of those files in a
process of its own. Other tests marked `gpu` need the device itself: sizes or timings that an interpreter does not
reach.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from tests.kernels.emulator.gemm import GemmMachine, compile_adapted, compile_gemm, compile_int8, forget
from tests.kernels.guard_pages import GuardPages

from stoker_kernels.launch.dispatch import interpreting

DEVICE_TESTS = "test_*on_device.py"
# Triton's interpreter turns 1-element arrays into loop bounds, which numpy deprecates.
INTERPRETER_WARNING = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.match(DEVICE_TESTS):
            item.add_marker(pytest.mark.filterwarnings(INTERPRETER_WARNING))
    if torch.cuda.is_available() and not interpreting():
        # What is slow in the interpreter takes no time here, and is shown nowhere else to be right.
        for item in items:
            if item.path.match(DEVICE_TESTS):
                item.add_marker(pytest.mark.gpu)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: needs a CUDA device"))
        elif item.path.match(DEVICE_TESTS) and not interpreting():
            item.add_marker(pytest.mark.skip(reason="gpu: without a CUDA device test_interpreter.py runs it"))


@pytest.fixture(autouse=True)
def _guard_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """No kernel that runs on the host, interpreted or emulated, reads or writes beyond its tensors."""
    with GuardPages() if interpreting() or "sm90" in request.path.name else nullcontext():
        yield


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run here: the GPU, or the CPU when interpreting."""
    return torch.device("cpu" if interpreting() else "cuda")


def in_place_of_a_device(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, *chained: str) -> Iterator[GemmMachine]:
    """The emulator with the kernels of `library`, the modules of which `chained` launch theirs in a chain."""
    made = GemmMachine(library)
    forget()
    made.install(monkeypatch)
    for module in chained:
        monkeypatch.setattr(f"stoker_kernels.{module}.pdl_on", lambda _: True)
    yield made
    forget()


@pytest.fixture(scope="session")
def gemm_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The GEMM kernels with clusters, compiled for the emulator."""
    return compile_gemm(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def machine(gemm_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[GemmMachine]:
    """The emulator in place of a device."""
    yield from in_place_of_a_device(gemm_library, monkeypatch)


@pytest.fixture(scope="session")
def int8_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Those of 8-bit integers, compiled for the emulator."""
    return compile_int8(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def int8_machine(int8_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[GemmMachine]:
    """The emulator in place of a device that has those."""
    yield from in_place_of_a_device(int8_library, monkeypatch, "gemm.tiles")


@pytest.fixture(scope="session")
def adapted_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels that adapters run in, compiled for the emulator."""
    return compile_adapted(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def adapted_machine(adapted_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[GemmMachine]:
    """The emulator in place of a device that launches those in a chain."""
    chained = ("gemm.adapted", "lora.cluster_shrink", "lora.mma_expand")
    yield from in_place_of_a_device(adapted_library, monkeypatch, *chained)
