"""Host memory that a GPU's kernels read and write, over the link.

Invariants: its addresses are the host's and the device's alike (unified addressing); it is unlocked when the last view
of it is gone, which is not before the work that reads it is done.
Knows nothing of what rests there.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from stoker_runtime.errors import ConfigError
from stoker_runtime.weights.copy_lanes import locked_pages, unlock_pages

GIB = 1024**3


class _Mapped:
    """Locked host memory as torch takes memory of a GPU from others; it holds this as long as it holds a view."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip
        # When the process ends the driver unlocks what is left, behind kernels that may still read.
        weakref.finalize(self, unlock_pages, host).atexit = False


def host_memory(count: int, device: torch.device) -> Tensor:
    """So many new bytes of host memory, as a tensor of `device`. On a CPU they are as any others.

    Raises ConfigError where the system has, or locks, no more.
    """
    if device.type == "cpu":
        return torch.empty(count, dtype=torch.uint8)
    try:
        with torch.cuda.device(device):
            return torch.as_tensor(_Mapped(locked_pages(count)), device=device)
    except (OSError, torch.cuda.CudaError) as error:
        raise ConfigError(
            f"{count / GIB:.2f} GiB of host memory for experts cannot be locked ({error}); lower "
            "--cpu-offload-experts, or raise the limit of locked memory (ulimit -l).",
            param="cpu_offload_experts",
        ) from error
