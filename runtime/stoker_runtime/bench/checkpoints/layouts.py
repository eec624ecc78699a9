"""How a random linear lies in a checkpoint of each layout: its tensors, what they are filled with, the configuration.

Invariants: pure. Codes are random, scales are one number so that weights spread as a BF16 checkpoint's do, and zero
points are in the middle. Norms, embedding and head stay bf16 in all of them.
Sources of the layouts: AutoAWQ's GEMM version, AutoGPTQ (zero points less one), compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

SCALE = 0.02
"""The standard deviation of weights."""
GROUP = 128
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
"""Bytes of a value, by its dtype as safetensors spells it."""
BFLOAT16_ONE = np.uint16(0x3F80)  # the gain of a norm
# Deviations of uniform codes: of 4 bits, of 8 bits, and of e2m1's sixteen numbers.
FOUR_BITS, EIGHT_BITS, E2M1 = 4.6, 73.9, 2.93
MIDDLES = {4: np.uint32(0x88888888), 8: np.uint32(0x7F7F7F7F)}  # of AWQ's words and of GPTQ's


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of a checkpoint: its published name, its dtype as safetensors spells it, its shape, and the value that fills
    it, in numbers of so many bytes; random ones where that is None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: np.generic | None = None

    @property
    def num_bytes(self) -> int:
        """How many it takes."""
        return int(np.prod(self.shape)) * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """`config` is config.json's quantization_config; `parts`: (stem of the name, rows, columns) → a linear's tensors.

    Rows must be multiples of `rows`, columns of `columns`.
    """

    config: dict[str, Any]
    parts: Callable[[str, int, int], Iterator[Tensor]]
    rows: int
    columns: int


def awq(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    """4 bits, eight of a row's neighbours in a word."""
    yield Tensor(f"{stem}.qweight", "I32", (columns, rows // 8))
    yield Tensor(f"{stem}.qzeros", "I32", (columns // GROUP, rows // 8), MIDDLES[4])
    yield Tensor(f"{stem}.scales", "F16", (columns // GROUP, rows), np.float16(SCALE / FOUR_BITS))


def gptq_8(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    """8 bits, four of a column's neighbours in a word."""
    yield Tensor(f"{stem}.qweight", "I32", (columns // 4, rows))
    yield Tensor(f"{stem}.qzeros", "I32", (columns // GROUP, rows // 4), MIDDLES[8])
    yield Tensor(f"{stem}.scales", "F16", (columns // GROUP, rows), np.float16(SCALE / EIGHT_BITS))


def w8a8(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    """Integers of 8 bits and a scale a row."""
    yield Tensor(f"{stem}.weight", "I8", (rows, columns))
    yield Tensor(f"{stem}.weight_scale", "F32", (rows, 1), np.float32(SCALE / EIGHT_BITS))


def nvfp4(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    """e2m1 in pairs, an e4m3 scale for 16, all of them divided by one number."""
    yield Tensor(f"{stem}.weight_packed", "U8", (rows, columns // 2))
    yield Tensor(f"{stem}.weight_scale", "F8_E4M3", (rows, columns // 16), np.uint8(0x38))  # 1.0
    yield Tensor(f"{stem}.weight_global_scale", "F32", (1,), np.float32(E2M1 / SCALE))


def mxfp4(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    """e2m1 in pairs, a power of two for 32."""
    yield Tensor(f"{stem}.weight_packed", "U8", (rows, columns // 2))
    yield Tensor(f"{stem}.weight_scale", "U8", (rows, columns // 32), np.uint8(127 - 7))  # 2^-7


def compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """compressed-tensors' configuration of one group of all linears but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": True, "desc_act": False}
_W8A8 = compressed(
    "int-quantized", {**_INT8, "strategy": "channel"}, {**_INT8, "strategy": "token", "dynamic": True}
)
_NVFP4 = compressed("nvfp4-pack-quantized", {**_FP4, "strategy": "tensor_group", "group_size": 16})
_MXFP4 = compressed("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32})
LAYOUTS = {
    "awq": Layout(_AWQ, awq, rows=8, columns=GROUP),
    "gptq-8bit": Layout(_GPTQ, gptq_8, rows=4, columns=GROUP),
    "w8a8": Layout(_W8A8, w8a8, rows=1, columns=1),
    "nvfp4": Layout(_NVFP4, nvfp4, rows=1, columns=16),
    "mxfp4": Layout(_MXFP4, mxfp4, rows=1, columns=32),
}
