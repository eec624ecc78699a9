"""The device of an executor: opening it, what of its memory is free, which kernels are pinned, and how long each phase
of a start takes.

Invariants: nothing large is allocated here.
Knows nothing of models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker_kernels.launch import dispatch
from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import FP8
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.processors import compute_threads
from stoker_runtime.executor.resolve import DeviceMemory

log = logging.getLogger(__name__)


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time one phase of the start and log it."""
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began
    log.info("start: %-8s %6.2f s", name, seconds[name])


def open_rank_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of one rank of one of the server's engines. Errors as `open_device`."""
    return open_device(config.device, config.gpu_of(rank) if config.all_ranks > 1 else None, config.local_ranks)


def open_device(name: str, index: int | None = None, count: int = 1) -> torch.device:
    """The device called "cuda", "cpu" or "auto" (cuda where there is one), its context created.

    `index` of `count` GPUs is a rank's; without one it is the process's current GPU.

    Raises:
        ConfigError: cuda was asked for and is not there, or fewer GPUs than ranks.
    """
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise ConfigError("device is cuda, but no CUDA device is visible; use --device cpu.", param="device")
    if name == "cpu" or not present:
        return torch.device("cpu")
    if torch.cuda.device_count() < count:
        raise ConfigError(
            f"tensor_parallel_size · pipeline_parallel_size · data_parallel_size, of one node, is {count}, but "
            f"{torch.cuda.device_count()} CUDA devices are visible; lower one of them, or give the server more GPUs.",
            param="tensor_parallel_size",
        )
    if index is not None:
        torch.cuda.set_device(index)
    torch.cuda.init()
    # The driver's launch queue and cuBLAS see one context from here on; programmatic launches need SM 9.0.
    device = torch.device("cuda", torch.cuda.current_device())
    enable_pdl(True)
    return device


def device_memory(device: torch.device, lent: int = 0) -> DeviceMemory:
    """Total bytes of the device and what is in use before Stoker allocates; zeros for the CPU.

    `lent` bytes in use are free again before anything large is allocated beside the weights.
    """
    if device.type == "cpu":
        return DeviceMemory(0, 0)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, total - free - lent)


def multiplies_bf16() -> bool:
    """Whether this processor multiplies bf16 faster than float32: by AVX-512 BF16, or AMX."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def gpu_bf16(device: torch.device) -> bool:
    """Whether a GPU multiplies bf16; of a CPU `multiplies_bf16` says it."""
    return device.type != "cuda" or chip_of(dispatch.sm_of(device)).bf16


def refuse_head(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError where the device does not multiply what `quantize_head` makes of the output head."""
    if config.quantize_head == "none":
        return
    try:
        dispatch.require(device, FP8, ("linear",))
    except dispatch.KernelUnavailable as error:
        raise ConfigError(
            f"quantize_head is {config.quantize_head}, which this device does not multiply: {error}. FP8 products want "
            "Ada, Hopper or newer; leave --quantize-head out.",
            param="quantize_head",
        ) from error


def use_threads(config: EngineConfig, weights: int, ranks: int = 1) -> None:
    """Compute with as many threads as a step that reads `weights` bytes can use here, or as the flag says.

    `ranks` processes share the processors.
    """
    threads = compute_threads(config.cpu_threads, weights, ranks)
    torch.set_num_threads(threads)
    log.info("start: %d threads compute", threads)


def hold(nbytes: int, device: torch.device) -> None:
    """Have torch keep one block of device memory that later tensors of the current stream, or capture, are cut from."""
    if device.type == "cuda":
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def pin_kernels(config: EngineConfig) -> None:
    """Apply `--kernel op=implementation`, and `--batch-invariant`.

    Raises:
        ConfigError: an op or implementation that does not exist, with the nearest one.
    """
    dispatch.demand_invariance(config.batch_invariant)
    for op, name in config.kernels:
        try:
            dispatch.pin(op, name)
        except ValueError as error:
            raise ConfigError(f"--kernel {op}={name}: {error}", param="kernel") from error
