"""The device of the GEMM kernels with clusters, on the emulator.

Knows nothing of what a kernel computes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.kernels.emulator.build import compile_emulated
from tests.kernels.emulator.machine import Machine

from stoker_kernels.gemm import adapted, small, wide
from stoker_kernels.launch import cuda
from stoker_kernels.launch.chip import HOPPER_SHARED
from stoker_kernels.lora import cluster_shrink, mma_expand

SOURCES = (
    *("sm90_bf16_gemm_gated.cu", "sm90_bf16_gemm_wide.cu", "sm90_e4m3_gemm_wide.cu", "sm90_bf16_gemm_multicast.cu"),
    *("sm90_bf16_gemm_fixed.cu", "sm90_e4m3_gemm_fixed.cu", "sm90_bf16_gemm_spread.cu", "sm90_e4m3_gemm_spread.cu"),
    *("sm90_gemm_cluster.cuh", "sm90_gemm_wide.cuh", "sm90_gemm_multicast.cuh", "sm90_gemm_spread.cuh"),
    *("cluster_split.cuh", "gemm_adapters.cuh", "gemm_epilogue.cuh", "silu.cuh", "sm90_chunk.cuh", "store_eights.cuh"),
    "sm90_wide_tile.cuh",
)
INT8_SOURCES = (
    *(f"sm90_s8_gemm_{kind}.cu" for kind in ("cluster", "multicast", "spread", "wide")),
    *SOURCES[SOURCES.index("sm90_gemm_cluster.cuh") :],
)
ADAPTED_SOURCES = (
    *("sm90_bf16_gemm_cluster_adapted.cu", "sm90_bf16_gemm_gated_adapted.cu", "sm90_bf16_gemm_multicast_adapted.cu"),
    *("sm90_bf16_lora_expand.cu", "sm90_bf16_lora_shrink.cu", "sm90_gemm_cluster.cuh", "sm90_gemm_multicast.cuh"),
    *("cluster_split.cuh", "gemm_adapters.cuh", "gemm_epilogue.cuh"),
    *("silu.cuh", "sm90_chunk.cuh"),
)


def compile_gemm(folder: Path) -> ctypes.CDLL:
    """The library of gemm.cpp; skips the test where there is no g++."""
    return _checked(compile_emulated(SOURCES, "gemm.cpp", folder))


def compile_int8(folder: Path) -> ctypes.CDLL:
    """The library of int8.cpp; skips the test where there is no g++."""
    return _checked(compile_emulated(INT8_SOURCES, "int8.cpp", folder))


def _checked(compiled: ctypes.CDLL) -> ctypes.CDLL:
    assert compiled.cluster_arguments_size() == ctypes.sizeof(small._Arguments)
    assert compiled.wide_arguments_size() == ctypes.sizeof(wide._Arguments)
    return compiled


def compile_adapted(folder: Path) -> ctypes.CDLL:
    """The library of adapted.cpp; skips the test where there is no g++."""
    compiled = compile_emulated(ADAPTED_SOURCES, "adapted.cpp", folder)
    assert compiled.adapter_arguments_size() == ctypes.sizeof(adapted.AdapterArguments)
    assert compiled.pair_list_bytes() == small.PAIR_LIST_BYTES
    assert compiled.shrink_arguments_size() == ctypes.sizeof(cluster_shrink.ShrinkArguments)
    assert compiled.expand_arguments_size() == ctypes.sizeof(mma_expand.ExpandArguments)
    return compiled


@dataclass
class GemmMachine(Machine):
    """`resident` clusters at once. `words`, where given: those that a product with adapters waits for, while all of
    `out` is still written, too. `ran` and `clusters` tell of the last launch.
    """

    resident: int = 1
    words: torch.Tensor | None = None
    clusters: int = 0
    ran: str = ""

    def kernel(self, stem: str, arch: str, name: str, shared_bytes: int, threads: int, device: int) -> cuda.Kernel:
        assert name.startswith(stem)
        return super().kernel(stem, arch, name, shared_bytes, threads, device)

    def launch(self, kernel: cuda.Kernel, grid: int, arguments: list[Any], device: Any, *, pdl: bool,
               cluster: int = 1) -> None:  # fmt: skip
        assert kernel.shared_bytes <= HOPPER_SHARED
        self.clusters, self.ran = grid // cluster, kernel.name
        launch = self.told(kernel, grid, cluster, self.words if "adapted" in kernel.name else None)
        kinds = {"expand": "lora_expand", "shrink": "lora_shrink", "adapted": "adapted_gemm"}
        kinds |= {"wide": "wide_gemm", "fixed": "wide_gemm"}
        kind = next((kinds[word] for word in kinds if word in kernel.name), "cluster_gemm")
        run = getattr(self.library, f"run_{kind}")
        run(kernel.handle, *(ctypes.byref(item) for item in (*arguments, launch)))

    def residents(self, size: int) -> int:
        return self.resident


def forget() -> None:
    """Forget maps and cuts: they are kept by address, and by what the device holds."""
    for kept in (wide._weight_map, small.weight_map, small._fitted):
        kept.cache_clear()
