"""The attention kernels compiled for each SM, with no GPU: that they build, fit, and use what they are meant to."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from stoker_kernels.attention import variants
from stoker_kernels.attention.share_plan import share_plan_kernel
from stoker_kernels.attention.tile_plan import tile_plan_kernel
from stoker_kernels.attention.triton_decode import decode_kernel, decode_plan_kernel
from stoker_kernels.attention.triton_prefill import prefill_kernel
from stoker_kernels.launch import nvcc
from stoker_kernels.launch.aot_registry import AotSpec, specs

SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # KiB, as NVIDIA states them
KERNELS = {
    decode_kernel: "decode",
    decode_plan_kernel: "plan",
    share_plan_kernel: "shares",
    tile_plan_kernel: "tiles",
    prefill_kernel: "prefill",
}
PLANS = (decode_plan_kernel, share_plan_kernel, tile_plan_kernel)


def cases() -> list[tuple[AotSpec, int, bool]]:
    """(spec, SM, launched with PDL) of the compact set: from SM 9.0 on as the engine launches there."""
    assert variants.EXACT_DIMS
    mine = [spec for spec in specs() if spec.kernel in KERNELS and spec.compact]
    return [(spec, sm, sm >= 90) for spec in mine for sm in SHARED_MEMORY if spec.min_sm <= sm <= spec.max_sm]


def name(case: tuple[AotSpec, int, bool]) -> str:
    spec, sm, _ = case
    return f"{KERNELS[spec.kernel]}-{'fp8' if '*u16' in spec.signature.values() else '16bit'}-sm{sm}"


def compiled(spec: AotSpec, sm: int, pdl: bool) -> CompiledKernel:
    arguments = spec.kernel.arg_names
    constants = {**spec.constants[0], "LAUNCH_PDL": pdl}
    signature = {n: spec.signature[n].split(":")[0] if n in spec.signature else "constexpr" for n in arguments}
    marked = [
        i
        for i, n in enumerate(arguments)
        if spec.signature.get(n, "").startswith("*") or ":16" in spec.signature.get(n, "")
    ]
    source = ASTSource(
        spec.kernel,
        signature,
        {(arguments.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in marked},
    )
    options = dict(spec.options) | ({"launch_pdl": True} if pdl else {})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def widest() -> list[tuple[AotSpec, int, bool]]:
    """The largest tiles of SMs with little shared memory: 256 dimensions, and any number of them up to that in fp32."""
    mine = [spec for spec in specs() if spec.kernel in (decode_kernel, prefill_kernel) and spec.max_sm in (75, 86, 120)]
    found = {}
    for spec in mine:
        constants = spec.constants[0]
        if constants["BLOCK_D"] == 256 and (constants["EXACT"] or spec.signature["q_ptr"] == "*fp32"):
            kind = (spec.kernel.__name__, spec.max_sm, spec.signature["q_ptr"] == "*fp32")
            found.setdefault(kind, (spec, spec.max_sm, spec.max_sm >= 90))
    return list(found.values())


@pytest.mark.matrix(take=4)
@pytest.mark.parametrize("case", widest(), ids=lambda case: f"{name(case)}-{case[0].signature['q_ptr']}")
def test_the_largest_tiles_fit_small_gpus(case: tuple[AotSpec, int, bool]) -> None:
    assert compiled(*case).metadata.shared <= SHARED_MEMORY[case[1]] * 1024


@cache
def hopper(kernel: str, fp8: bool) -> CompiledKernel:
    kind = f"{kernel}-{'fp8' if fp8 else '16bit'}-sm90"
    return compiled(*next(case for case in cases() if name(case) == kind))


@pytest.mark.matrix(take=14)
@pytest.mark.parametrize("case", cases(), ids=name)
def test_it_compiles_and_fits(case: tuple[AotSpec, int, bool]) -> None:
    spec, sm, _ = case
    kernel = compiled(*case)
    assert kernel.metadata.shared <= SHARED_MEMORY[sm] * 1024
    assert kernel.asm["cubin"]
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (sm >= 90)
    if spec.kernel not in PLANS and sm >= 80:
        assert "cp.async" in kernel.asm["ptx"]
    if spec.kernel not in PLANS and 80 <= sm < 90:
        assert "mma.sync" in kernel.asm["ptx"]
    assert sm == 90 or "wgmma" not in kernel.asm["ptx"]


@pytest.mark.parametrize("fp8", [False, True])
def test_prefill_on_hopper_uses_wgmma(fp8: bool) -> None:
    ptx = hopper("prefill", fp8).asm["ptx"]
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16", ptx)
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("fp8", [False, True])
def test_decode_on_hopper_keeps_pages_in_flight(fp8: bool) -> None:
    """Buffers of 64 keys and values of 128: three for two programs an SM, two of e4m3 for five."""
    kernel = hopper("decode", fp8)
    buffer, buffers = (64 * 128 * 2, 2) if fp8 else (64 * 128 * 4, 3)
    assert buffers * buffer <= kernel.metadata.shared < (buffers + 1) * buffer
    assert kernel.asm["ptx"].count("cp.async.cg") > 16


def test_decode_of_e4m3_loads_no_single_bytes() -> None:
    assert not re.search(r"ld\.(shared|global)[.a-z0-9]*\.[bus]8", hopper("decode", True).asm["ptx"])


@pytest.mark.parametrize("stem", ["sm90_decode", "sm90_mixed", "sm90_prefill"])
def test_cuda_kernels_compile_without_spills(stem: str, tmp_path: Path) -> None:
    try:
        nvcc.toolkit()
    except nvcc.NvccMissing as missing:
        pytest.skip(str(missing))
    assert nvcc.compile_cubin(stem, "sm_90a", tmp_path) == ""
