"""What `quantization_config` says of a checkpoint whose weights are integers of 4 or 8 bits: AWQ, GPTQ,
compressed-tensors.

Invariants: torch-free. A setting under which the stored numbers would mean something else is a ModelError that names
it. Activations keep 16 bits.
Knows nothing of tensors; which weights are left alone it is asked by module name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from stoker_runtime.models.quantization.integer_scheme import IntegerScheme
from stoker_runtime.models.quantization.module_names import is_named
from stoker_runtime.models.quantization.refusal import refused

BITS = (4, 8)
LEFT_OUT = "-:"
"""What stands before the pattern of modules that GPTQ's `dynamic` leaves out."""


class Packing(StrEnum):
    """How a file holds codes, scales and zero points; `weights/packed/integer_files.py` reads each."""

    AWQ = "awq"
    GPTQ = "gptq"  # zero points are stored less one
    GPTQ_V2 = "gptq_v2"
    COMPRESSED = "pack-quantized"


@dataclass(frozen=True, slots=True)
class IntegerCheckpoint:
    """`ignored` names the modules that are not quantized; `anywhere`: as a part of a name, not as whole names.

    Either way `re:` stands before a regular expression of whole names.
    """

    method: str
    packing: Packing
    scheme: IntegerScheme
    ignored: tuple[str, ...] = ()
    anywhere: bool = False
    note: str = ""

    @property
    def kind(self) -> Literal["int4", "int8"]:
        """How its weights rest in memory."""
        return self.scheme.kind

    @property
    def described(self) -> str:
        """What its weights are, in words."""
        return f"integers of {self.scheme.bits} bits"

    def leaves(self, module: str) -> bool:
        """Whether the weight of `module` (`model.layers.0.mlp.up_proj`) is not quantized."""
        if self.anywhere:
            return any(part in module if part[:3] != "re:" else is_named(part, module) for part in self.ignored)
        return any(is_named(pattern, module) for pattern in self.ignored)


def read_awq(name: str, given: Mapping[str, Any]) -> IntegerCheckpoint:
    """AWQ in the GEMM layout. Raises ModelError for what is not supported."""
    version = str(given.get("version") or "gemm").lower()
    if version != "gemm":
        raise refused(name, "version", version, "gemm")
    if _bits(name, "bits", given) != 4:
        raise refused(name, "bits", given.get("bits"), "4 with AWQ")
    scheme = IntegerScheme(4, _group(name, given), zeros=True)
    ignored = tuple(map(str, given.get("modules_to_not_convert") or ()))
    return IntegerCheckpoint("awq", Packing.AWQ, scheme, ignored, anywhere=True)


def read_gptq(name: str, given: Mapping[str, Any]) -> IntegerCheckpoint:
    """GPTQ, with and without act-order. Raises ModelError for what is not supported."""
    form = str(given.get("checkpoint_format") or "gptq").lower()
    if form not in (Packing.GPTQ, Packing.GPTQ_V2):
        raise refused(name, "checkpoint_format", form, "gptq, gptq_v2")
    if given.get("lm_head"):
        raise refused(name, "lm_head", True, "false: output heads in integers are not supported")
    dynamic = given.get("dynamic") or {}
    assert all(str(pattern).startswith(LEFT_OUT) for pattern in dynamic), "others are mixed_settings.py's to read"
    scheme = IntegerScheme(
        _bits(name, "bits", given), _group(name, given), zeros=True, order=bool(given.get("desc_act"))
    )
    ignored = (
        *map(str, given.get("modules_to_not_convert") or ()),
        *(f"re:{pattern.removeprefix(LEFT_OUT)}" for pattern in dynamic),
    )
    return IntegerCheckpoint("gptq", Packing(form), scheme, ignored, anywhere=True)


def read_packed(name: str, weights: Mapping[str, Any], form: str, ignored: Sequence[str]) -> IntegerCheckpoint:
    """compressed-tensors' `pack-quantized`: `weights` is the one group's. Raises ModelError for what is not
    supported.
    """
    if form != Packing.COMPRESSED:
        raise refused(name, "format", form, f"{Packing.COMPRESSED} for integer weights")
    strategy = str(weights.get("strategy"))
    if strategy not in ("group", "channel"):
        raise refused(name, "weights.strategy", strategy, "group, channel")
    act_order = weights.get("actorder")
    if act_order not in (None, False, "weight", "static", "group", "dynamic"):
        raise refused(name, "weights.actorder", act_order, "null, weight, group")
    scheme = IntegerScheme(
        _bits(name, "num_bits", weights),
        _group(name, weights) if strategy == "group" else 0,
        zeros=not weights.get("symmetric", True),
        order=act_order in ("group", "dynamic"),
    )
    return IntegerCheckpoint("compressed-tensors", Packing.COMPRESSED, scheme, tuple(ignored))


def _bits(name: str, key: str, given: Mapping[str, Any]) -> int:
    if given.get(key) not in BITS:
        raise refused(name, key, given.get(key), "4 or 8")
    return int(given[key])


def _group(name: str, given: Mapping[str, Any]) -> int:
    """Columns of a group; 0 for whole rows."""
    size = given.get("group_size", 128)
    if size in (-1, None):
        return 0
    if not isinstance(size, int) or size < 1:
        raise refused(name, "group_size", size, "a number of columns, or -1")
    return size
