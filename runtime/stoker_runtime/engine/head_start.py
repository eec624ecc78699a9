"""What the engine process starts before torch is imported, in threads that need little of Python: it takes seconds.

The CUDA context is created through the driver, where torch finds it, and safetensors are uploaded; the kernel is asked
to read the weights' files ahead, which costs nothing where they are in the page cache.

Invariants: nothing here decides anything. What fails is met again, and reported, by the code that needs it.
Knows nothing of torch or of what the files hold.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.checkpoint.safetensors_index import checkpoint_files
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError, StokerError
from stoker_runtime.parallel.place import LEADER
from stoker_runtime.weights.cuda_driver import CudaDriver, begin_context
from stoker_runtime.weights.upload_ahead import UploadAhead

if TYPE_CHECKING:
    from stoker_runtime.ranks.crew import Crew

WEIGHT_SUFFIXES = (".safetensors", ".gguf")
GIB = 1024**3

log = logging.getLogger(__name__)


def begin(config: EngineConfig) -> UploadAhead | None:
    """Start the threads for this configuration; they end by themselves. None where there is no GPU to upload to."""
    threading.Thread(
        target=read_ahead, args=(weight_files(config.model),), name="stoker-read-ahead", daemon=True
    ).start()
    if config.device == "cpu":
        return None
    # Of several ranks, or engines, each reads what it needs of the files, to its own device.
    # In-situ quantization never has the files' 16 bits on the device, nor experts in host memory all of the files.
    if config.all_ranks > 1 or config.isq != "none" or config.cpu_offload_experts:
        begin_context(config.gpu_of(LEADER))
        return None
    ahead = UploadAhead(uploadable(config.model), lambda *memory: upload_room(config, *memory))
    threading.Thread(target=ahead.run, args=(CudaDriver,), name="stoker-upload", daemon=True).start()
    return ahead


def begin_ranks(config: EngineConfig) -> Crew | None:
    """Start the other ranks' processes, which import and meet as this one does; None where there are none.

    None also where they cannot be started: whoever builds the model meets that again.
    """
    if config.ranks == 1:
        return None
    from stoker_runtime.ranks.build import end_process
    from stoker_runtime.ranks.crew import Crew

    try:
        return Crew(config.validate(), on_fault=end_process)
    except StokerError as error:
        log.debug("no ranks ahead: %s", error)
        return None


def upload_room(config: EngineConfig, free: int, total: int, files: int) -> int:
    """How many of so many bytes of `files` may be on the device beside the weights made of them.

    Both stay below what may be used of its free bytes, and of all. Below zero where the weights alone do not.
    """
    unused = int(total * (1 - config.gpu_memory_utilization))
    may_use = free - max(unused, int(config.gpu_memory_reserve_gb * GIB))
    # Weights become larger than their files in float32 alone: twice as large as the usual 16 bits.
    return int(may_use * 0.9) - files * (2 if config.dtype == "float32" else 1)


def weight_files(model: str) -> list[Path]:
    """The files of a local model that hold weights; none for anything else."""
    path = Path(model)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    if path.suffix not in WEIGHT_SUFFIXES:
        return []
    parts = [path.with_name(name) for name in part_names(path.name)] or [path]
    return [part for part in parts if part.is_file()]


def uploadable(model: str) -> list[Path]:
    """The files of a local checkpoint whose bytes are of use on the device as they are: safetensors."""
    path = Path(model)
    try:
        return checkpoint_files(path) if path.is_dir() else []
    except ModelError as error:
        log.debug("nothing is uploaded ahead: %s", error)
        return []


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
