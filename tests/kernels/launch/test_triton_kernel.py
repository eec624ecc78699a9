"""Launches from cubins: what a launch asks for, how arguments are packed, and what happens without a variant."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from stoker_kernels.launch import at_need, cubin_launch, cuda, triton_kernel
from stoker_kernels.launch.aot_index import Cubin, Index, Wanted
from stoker_kernels.launch.cubin_launch import CubinLaunch
from stoker_kernels.launch.rehearsal import Missing, rehearse
from stoker_kernels.launch.triton_kernel import PrecompiledKernel
from stoker_kernels.norm.triton_rms_norm import _rms_norm_kernel
from stoker_kernels.slots.triton_slots import _commit_tokens_kernel

CUBIN = Cubin(
    file="k.cubin",
    kernel="m.k",
    source="1",
    entry="k",
    threads=96,
    shared=1024,
    launch_pdl=True,
    arguments={"x": "*bf16", "n": "i32", "scale": "fp32", "y": "*i64", "wide": "i64"},
    constants={},
    options={},
)


class Driver:
    """Takes the place of cuLaunchKernelEx and keeps what a launch would have read."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[tuple[int, ...], bytes]] = []
        self.launch: CubinLaunch | None = None

    def __call__(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        seen = config._obj
        sizes = (8, 4, 4, 8, 8, 8, 8)
        values = b"".join((cubin_launch.ctypes.string_at(at, size)) for at, size in zip(pointers, sizes, strict=True))
        numbers = ("grid_x", "grid_y", "grid_z", "block_x", "shared", "stream", "num_attributes")
        self.calls.append((tuple(getattr(seen, name) or 0 for name in numbers), values))
        assert (seen.attributes[0].id, seen.attributes[0].value) == (6, 1)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cubin_launch, "_cu_launch_kernel_ex", lambda: driver)
    monkeypatch.setattr(cuda, "load_cubin", lambda *_: 77)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 4242, raising=False)
    return driver


def test_arguments_reach_the_driver_in_the_cubins_order(driver: Driver) -> None:
    launch = CubinLaunch(Path("k.cubin"), CUBIN, [0, 2, 3, 1, 4], 0)
    x, y = torch.empty(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int64)
    launch((7, 2), 0, (x, y, -5, 0.5, 2**40))
    shape, values = driver.calls[0]
    assert shape == (7, 2, 1, 96, 1024, 4242, 1)
    assert struct.unpack("=QifQqQQ", values) == (x.data_ptr(), -5, 0.5, y.data_ptr(), 2**40, 0, 0)


def test_a_refused_launch_raises(driver: Driver) -> None:
    driver.status = 700
    launch = CubinLaunch(Path("k.cubin"), CUBIN, [0, 1, 2, 3, 4], 0)
    x = torch.empty(4)
    with pytest.raises(cuda.CudaError, match="700 for k with grid"):
        launch((1,), 0, (x, 1, 1.0, x, 1))


def test_a_launch_is_described_as_triton_specializes_it() -> None:
    x, weight = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(65, dtype=torch.bfloat16)[1:]
    arguments = (x, None, weight, x, None, None, 0.5, 64, 0, 63, 1e-6)
    wanted = _rms_norm_kernel.wanted(
        _rms_norm_kernel.kinds(arguments), {"BLOCK": 64, "LAUNCH_PDL": True, "num_warps": 1, "launch_pdl": True}
    )
    assert wanted.kernel == "triton_rms_norm.rms_norm_kernel"
    assert wanted.arguments == {
        "x": ("*bf16", True), "residual": ("none", False), "weight": ("*bf16", False), "out": ("*bf16", True),
        "scales": ("none", False), "post": ("none", False), "multiplier": ("fp32", False),
        "x_stride": ("i32", True), "residual_stride": ("i32", True), "hidden": ("i32", False),
        "eps": ("fp32", False),
    }  # fmt: skip
    assert (wanted.constants, wanted.options) == ({"BLOCK": 64, "LAUNCH_PDL": True}, {"num_warps": 1})


def test_one_is_an_integer_like_any_other() -> None:
    wanted = _commit_tokens_kernel.wanted(_commit_tokens_kernel.kinds((*[torch.empty(4)] * 6, 1)), {})
    assert wanted.arguments["rows"] == ("i32", False)


def test_a_digest_covers_the_functions_that_are_called() -> None:
    before = _rms_norm_kernel.source
    pieces = list(triton_kernel._pieces(_rms_norm_kernel, set()))
    assert any("def pdl_wait" in piece for piece in pieces)
    assert any("def store_rounded" in piece for piece in pieces)
    assert len(before) == 16
    assert before != _commit_tokens_kernel.source


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, "cubin" or "triton", of kernels on a device that is not there."""
    ran: list[str] = []

    class Launch:
        def __init__(self, *_: Any) -> None: ...

        def __call__(self, *_: Any) -> None:
            ran.append("cubin")

    monkeypatch.setattr(triton_kernel, "CubinLaunch", Launch)
    monkeypatch.setattr(triton_kernel, "sm_of", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: ran.append("triton"))
    monkeypatch.setattr(triton_kernel, "note_compiled", lambda kernel, reason: ran.append(f"noted {kernel}"))
    return ran


def _fresh() -> PrecompiledKernel:
    return PrecompiledKernel(_commit_tokens_kernel.fn, [])


def _launch(kernel: PrecompiledKernel) -> None:
    kernel[(1,)](*[torch.empty(4, dtype=torch.int32)] * 6, 3, ROWS=128, LAUNCH_PDL=True, launch_pdl=True)


def test_a_precompiled_launch_never_reaches_triton(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wanted] = []
    monkeypatch.setattr(triton_kernel, "read_index", lambda sm: Index(Path(), ()))
    monkeypatch.setattr(Index, "find", lambda self, wanted: asked.append(wanted) or CUBIN)
    monkeypatch.setattr(triton_kernel.PrecompiledKernel, "arg_names", list(CUBIN.arguments), raising=False)
    kernel = _fresh()
    kernel.arg_names = [*kernel.arg_names, *CUBIN.arguments]
    for _ in range(3):
        _launch(kernel)
    assert launches == ["cubin"] * 3
    assert len(asked) == 1, "found once, then kept"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Missing]:
    """What was compiled, where nothing came precompiled."""
    found: list[Missing] = []
    cache = Index(tmp_path, ())

    def compile_one(missing: Missing) -> Cubin:
        found.append(missing)
        return CUBIN

    monkeypatch.setattr(at_need, "compile_one", compile_one)
    monkeypatch.setattr(triton_kernel, "cached_index", lambda sm: cache)
    monkeypatch.setattr(triton_kernel, "read_index", lambda sm: Index(Path(), ()))
    monkeypatch.setattr(triton_kernel, "find_cubin", lambda sm, wanted: (tmp_path, CUBIN) if found else None)
    return found


def test_a_launch_without_a_variant_is_compiled_and_said(launches: list[str], compiled: list[Missing]) -> None:
    kernel = _fresh()
    kernel.arg_names = [*kernel.arg_names, *CUBIN.arguments]
    for _ in range(2):
        _launch(kernel)
    assert launches == ["noted triton_slots.commit_tokens_kernel", "cubin", "cubin"], "never by Triton's own launcher"
    assert [missing.sm for missing in compiled] == [90]


def test_a_rehearsal_launches_nothing_and_tells_what_is_missing(launches: list[str], compiled: list[Missing]) -> None:
    kernel = _fresh()
    kernel.arg_names = [*kernel.arg_names, *CUBIN.arguments]
    with rehearse() as missing:
        _launch(kernel)
        _launch(kernel)
    assert launches == ["noted triton_slots.commit_tokens_kernel"] * 2
    assert [each.kernel for each in missing.values()] == [kernel]
    compiled += missing.values()
    with rehearse() as missing:
        _launch(kernel)
    assert missing == {}
    assert launches == ["noted triton_slots.commit_tokens_kernel"] * 2, "loaded, and not launched"
    _launch(kernel)
    assert launches[-1] == "cubin"


def test_there_is_one_rehearsal_at_a_time() -> None:
    with rehearse(), pytest.raises(RuntimeError, match="under way"), rehearse():
        pass
    with rehearse():
        pass


def test_interpreted_kernels_stay_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "interpreting", lambda: True)
    made = triton_kernel.kernel(do_not_specialize=["rows"])(_commit_tokens_kernel.fn)
    assert not isinstance(made, PrecompiledKernel)
    assert made.arg_names == _commit_tokens_kernel.arg_names
    assert triton.__version__
