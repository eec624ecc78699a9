"""From an EngineConfig to a running executor, in phases that the start-up log shows.

Invariants: every size is known before the first large allocation; a kernel that is missing for this device and dtype
stops the start here, by name; nothing is compiled or allocated later that could fail under load.
Knows nothing of requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker_kernels import dispatch
from stoker_kernels.dispatch import KernelUnavailable
from stoker_kernels.pdl import enable_pdl
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, KernelUnavailableError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.resolve import GIB, DeviceMemory, plan_memory, resolve
from stoker_runtime.executor.state import state_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.process_clock import process_age
from stoker_runtime.weights.layout import TORCH_DTYPES
from stoker_runtime.weights.load import load_weights

log = logging.getLogger(__name__)

# Decode sizes captured before ready; the rest follow while the engine idles or at the first step of their size.
FIRST_GRAPHS = (1, 2, 4, 8)


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time one phase of the start and log it."""
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began
    log.info("start: %-8s %6.2f s", name, seconds[name])


def build_executor(config: EngineConfig) -> Executor:
    """Load the model and allocate everything.

    Raises:
        ConfigError: a size that does not fit, or a device that is not there; names the flag.
        ModelError: a checkpoint that cannot be used.
        KernelUnavailableError: an op without a kernel for this device and dtype.
    """
    config.validate()
    seconds = {"import": process_age()}
    log.info("start: %-8s %6.2f s", "import", seconds["import"])
    with phase("model", seconds):
        source = read_source(config.model)
        spec = build_spec(source)
    with phase("device", seconds):
        device = open_device(config.device)
        config = resolve(config, spec, device.type)
        memory = device_memory(device)
    pin_kernels(config)
    weights_bytes = spec.parameter_bytes(config.dtype, config.quantization)
    plan = plan_memory(config, spec, memory, weights_bytes, state_bytes(config, spec))
    dtype = TORCH_DTYPES[config.dtype]
    with phase("weights", seconds), torch.inference_mode():
        weights = load_weights(source, spec, device, dtype, config.quantization, seed=config.seed)
    with phase("cache", seconds), torch.inference_mode():
        decoder = Decoder(spec, weights, device, dtype, max_model_len=config.max_model_len)
        executor = Executor(config, decoder, plan, device)
    with phase("kernels", seconds):
        try:
            executor.load_kernels(FIRST_GRAPHS)
        except KernelUnavailable as error:
            raise KernelUnavailableError(str(error)) from error
    with phase("graphs", seconds):
        executor.capture(FIRST_GRAPHS)
    for op, implementation in dispatch.chosen().items():
        log.info("kernel: %-22s %s", op, implementation)
    log.info(
        "memory: weights %.2f GiB, KV %.2f GiB (%d pages of %d tokens), workspace %.2f GiB",
        plan.weights / GIB, plan.kv_bytes / GIB, plan.pages, config.page_size, plan.workspace / GIB,
    )  # fmt: skip
    executor.start_seconds = seconds
    return executor


def open_device(name: str) -> torch.device:
    """The device called "cuda", "cpu" or "auto" (cuda where there is one), its context created.

    Raises:
        ConfigError: cuda was asked for and is not there.
    """
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise ConfigError("device is cuda, but no CUDA device is visible; use --device cpu.", param="device")
    if name == "cpu" or not present:
        return torch.device("cpu")
    torch.cuda.init()
    # The driver's launch queue and cuBLAS see one context from here on; programmatic launches need SM 9.0.
    device = torch.device("cuda", torch.cuda.current_device())
    enable_pdl(True)
    return device


def device_memory(device: torch.device) -> DeviceMemory:
    """Total bytes of the device and what is in use before Stoker allocates; zeros for the CPU."""
    if device.type == "cpu":
        return DeviceMemory(0, 0)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, total - free)


def pin_kernels(config: EngineConfig) -> None:
    """Apply `--kernel op=implementation`.

    Raises:
        ConfigError: an op or implementation that does not exist, with the nearest one.
    """
    for op, name in config.kernels:
        try:
            dispatch.pin(op, name)
        except ValueError as error:
            raise ConfigError(f"--kernel {op}={name}: {error}", param="kernel") from error
