"""A device that runs the kernels of csrc/sm90_packed_experts.cuh on the CPU, by `emulator/`."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.kernels.emulator.build import compile_emulated
from tests.kernels.moe import few_machine

from stoker_kernels.moe.hopper import sm90_packed

SOURCES = (
    *("sm90_packed_experts.cuh", "packed_codes.cuh", "four_bits.cuh"),
    *("few_arguments.cuh", "few_choice.cuh", "few_plan.cuh"),
)


def compiled_kernels(folder: Path) -> ctypes.CDLL:
    """The library of the kernels."""
    compiled = compile_emulated(SOURCES, "packed_experts.cpp", folder)
    assert compiled.arguments_size() == ctypes.sizeof(sm90_packed.PackedArguments)
    return compiled


class Machine(few_machine.Machine):
    """The same of these kernels."""

    host, kinds, entry = sm90_packed, list(sm90_packed.KINDS), "packed_experts"
