"""A mode in which each new tensor ends where its memory ends: a kernel that goes beyond one dies at that instruction.

On a GPU such an access finds memory of another tensor nearly always, and nothing shows. In Triton's interpreter, and in
the emulator of CUDA kernels, addresses are the host's, where the page behind a tensor can be locked.
Invariants: values are those that torch made; views and tensors changed in place stay where they are. Up to 15 bytes
behind a tensor are not watched, because kernels want its start on 16 bytes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ALIGNMENT = 16
NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte lies before a page that nobody may touch."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    used = -(-extent * tensor.itemsize // ALIGNMENT) * ALIGNMENT
    pages = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(start + pages, mmap.PAGESIZE, NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=pages - used, count=extent * tensor.itemsize)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class GuardPages(TorchDispatchMode):
    """Moves what an operator made, and did not merely view or change, behind a guard."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):
            return out
        return tree_map_only(torch.Tensor, guarded, out)
