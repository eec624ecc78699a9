"""Turns the blocks of a GGUF tensor into numbers, with the gguf package's definitions of the block types.

Invariants: the result is fp32, row-major. The gguf package is imported by the first tensor that needs it.
Knows nothing of files and destinations.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.errors import ModelError


def make_decoder(entry: TensorEntry, head_rows: int) -> Callable[[Tensor], Tensor]:
    """A function from the bytes of whole rows to their numbers, fp32.

    `head_rows` > 0 also undoes GGUF's row order of Llama's Q and K: there, neighbouring rows of a head are the two
    halves of a rotated pair; here, as in the original checkpoint, the second halves follow all first halves.
    """
    dequantize = _dequantizer(entry)
    per_row = prod(entry.shape[1:])

    def decode(raw: Tensor) -> Tensor:
        numbers = dequantize(raw)
        if entry.stride:
            rows = numbers.view(raw.numel() * entry.shape[0] // entry.num_bytes, -1)
            numbers = rows[:, entry.lead : entry.lead + per_row].contiguous()
        if not head_rows:
            return numbers
        pairs = numbers.view(-1, head_rows // 2, 2, per_row)
        return pairs.transpose(1, 2).contiguous()

    return decode


def _dequantizer(entry: TensorEntry) -> Callable[[Tensor], Tensor]:
    import gguf

    kind = gguf.GGMLQuantizationType[entry.encoding]

    def dequantize(raw: Tensor) -> Tensor:
        try:
            return torch.from_numpy(gguf.dequantize(raw.numpy(), kind))
        except NotImplementedError as error:
            raise ModelError(
                f"{entry.file}: tensor {entry.name} is {entry.encoding}, which gguf cannot decode."
            ) from error

    return dequantize
