"""Bytes that `upload_ahead.py` has brought to the device, as tensors.

Invariants: a tensor made here owns nothing and is dead once the block is closed; its first byte stands where numbers of
its dtype may.
Knows nothing of how the bytes came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.weights.upload_ahead import UploadAhead


class DeviceBytes:
    """`count` bytes at `address` of the current device, in the protocol by which libraries share arrays."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(address: int, count: int) -> Tensor:
    """`count` bytes of device memory."""
    return torch.as_tensor(DeviceBytes(address, count), device="cuda")


def uploaded(ahead: UploadAhead, entry: TensorEntry, dtype: torch.dtype) -> Tensor | None:
    """The numbers of an entry, flat, or None if they are to be read from its file."""
    address = ahead.address(entry.file, entry.offset, entry.num_bytes)
    if address is None:
        return None
    values = bytes_at(address, entry.num_bytes)
    # The format does not align what follows a header of odd length.
    return (values.clone() if address % dtype.itemsize else values).view(dtype)
