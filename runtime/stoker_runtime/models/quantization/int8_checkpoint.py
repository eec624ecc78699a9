"""What a configuration says of a checkpoint of eight-bit integers whose products read activations in eight bits, too:
compressed-tensors' `int-quantized` (W8A8).

Invariants: torch-free. A setting under which the stored numbers would mean something else is a ModelError that names
it. Activations are quantized per token as they come, without zero points, whatever the checkpoint suggests: `note` says
so where that is not what it was made for.
Knows nothing of tensors; which weights are left alone it is asked by module name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stoker_runtime.models.quantization.module_names import is_matched
from stoker_runtime.models.quantization.refusal import refused

FORMAT = "int-quantized"
STRATEGIES = ("channel", "tensor")


@dataclass(frozen=True, slots=True)
class Int8Checkpoint:
    """`ignored` names the modules that are not quantized, `re:` before a regular expression."""

    ignored: tuple[str, ...] = ()
    note: str = ""
    method: str = "compressed-tensors"
    kind: Literal["int8_channel"] = "int8_channel"
    described: str = "INT8 with activations in INT8"
    scheme: None = None

    def leaves(self, module: str) -> bool:
        """Whether the weight of `module` (`model.layers.0.mlp.up_proj`) is not quantized."""
        return any(is_matched(pattern, module) for pattern in self.ignored)


def read_int8(name: str, group: Mapping[str, Any], form: str, ignored: tuple[str, ...]) -> Int8Checkpoint:
    """compressed-tensors' integers on both sides: the one group. Raises ModelError for what is not supported."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    for key, settings in (("weights", weights), ("input_activations", inputs)):
        if (settings.get("num_bits"), settings.get("type")) != (8, "int"):
            found = f"{settings.get('type')}{settings.get('num_bits')}"
            raise refused(name, key, found, "8-bit integers on both sides")
    if form != FORMAT:
        raise refused(name, "format", form, f"{FORMAT} for integers with quantized activations")
    if not weights.get("symmetric", True):
        raise refused(name, "weights.symmetric", False, "true")
    if weights.get("strategy") not in STRATEGIES:
        raise refused(name, "weights.strategy", weights.get("strategy"), ", ".join(STRATEGIES))
    if weights.get("actorder") not in (None, False):
        raise refused(name, "weights.actorder", weights["actorder"], "null")
    notes = []
    if not inputs.get("dynamic"):
        notes.append("the checkpoint's static activation scales")
    if not inputs.get("symmetric", True):
        notes.append("its activations' zero points")
    return Int8Checkpoint(ignored, " and ".join(notes))
