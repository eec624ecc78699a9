"""What the engine process starts before torch is imported, in threads that need no Python: the import takes seconds.

The CUDA context is created through the driver, and torch finds it there; the kernel is asked to read the weights'
files ahead, which costs nothing where they are in the page cache.

Invariants: nothing here decides anything. What fails is met again, and reported, by the code that needs it.
Knows nothing of torch or of what the files hold.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path

from stoker_runtime.config import EngineConfig

WEIGHT_SUFFIXES = (".safetensors", ".gguf")

log = logging.getLogger(__name__)


def begin(config: EngineConfig) -> list[threading.Thread]:
    """Start the threads for this configuration; they end by themselves."""
    files = weight_files(config.model)
    threads = [threading.Thread(target=read_ahead, args=(files,), name="stoker-read-ahead", daemon=True)]
    if config.device != "cpu":
        threads.append(threading.Thread(target=create_context, name="stoker-context", daemon=True))
    for thread in threads:
        thread.start()
    return threads


def weight_files(model: str) -> list[Path]:
    """The files of a local model that hold weights; none for anything else."""
    path = Path(model)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    return [path] if path.suffix in WEIGHT_SUFFIXES and path.is_file() else []


def read_ahead(files: list[Path]) -> None:
    """Ask for the files' pages; returns when the requests are queued."""
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            log.debug("%s cannot be read ahead: %s", file, error)
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def create_context() -> None:
    """Create the first device's primary context, which the CUDA runtime, and so torch, takes over."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        log.debug("no CUDA driver: %s", error)
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    status = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
    if status:
        log.debug("the context was not created ahead: CUDA error %d", status)
