"""The end of writing a GGUF file, whatever it holds: its tensors in the kinds that a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gguf
from gguf import GGMLQuantizationType as Kind
from torch import Tensor


def write_tensors(
    writer: gguf.GGUFWriter,
    tensors: Mapping[str, Tensor],
    kind: Callable[[str], Kind],
    rounded: Callable[[str], Kind] | None,
) -> None:
    """Add `tensors` and write all; those of two dimensions or more as `kind` says.

    `rounded`: their numbers are first what blocks of that kind stand for.
    """
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy()
        if rounded is not None and data.ndim > 1:
            data = gguf.dequantize(gguf.quantize(data, rounded(name)), rounded(name))
        encoded = kind(name) if data.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(data, encoded), raw_dtype=encoded)
    write_out(writer)


def write_out(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
