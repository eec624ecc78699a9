"""What `quantization_config` says of a checkpoint whose weights are FP8 already.

Invariants: torch-free. A setting under which the stored numbers would mean something else is a ModelError that names
it. Activations are always quantized per token as they come, whatever the checkpoint suggests: `note` says so where
that is not what it was made for.
Knows nothing of tensors; which weights are left alone it is asked by module name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_runtime.models.quantization.module_names import is_matched
from stoker_runtime.models.quantization.refusal import refused

BLOCK = [128, 128]
METHODS = ("fp8", "fbgemm_fp8")
# compressed-tensors' names of how far a scale of a weight reaches.
STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Fp8Checkpoint:
    """`kind` is how its weights rest in memory: fp8_channel (a scale for the tensor spreads over its channels) or
    fp8_block. `ignored` names the modules that are not quantized, `re:` before a regular expression.
    """

    method: str
    kind: str
    ignored: tuple[str, ...] = ()
    note: str = ""

    @property
    def scheme(self) -> None:
        """None: a weight lies in one tensor, and its scales in another."""
        return None

    @property
    def described(self) -> str:
        """What its weights are, in words."""
        return "FP8"

    def leaves(self, module: str) -> bool:
        """Whether the weight of `module` (`model.layers.0.mlp.up_proj`) is not quantized."""
        return any(is_matched(pattern, module) for pattern in self.ignored)


def read_fp8(name: str, given: Mapping[str, Any], ignored: tuple[str, ...]) -> Fp8Checkpoint:
    """What a `quantization_config` of the methods fp8 and fbgemm_fp8 describes. Raises ModelError for the
    unsupported.
    """
    method = str(given["quant_method"])
    if method == "fbgemm_fp8":
        note = "fbgemm's upper bound on activation scales" if given.get("activation_scale_ub") is not None else ""
        return Fp8Checkpoint(method, "fp8_channel", ignored, note)
    if str(given.get("fmt") or "e4m3") != "e4m3":
        raise refused(name, "fmt", given["fmt"], "e4m3")
    block = given.get("weight_block_size")
    if block is not None and list(block) != BLOCK:
        raise refused(name, "weight_block_size", block, "[128, 128]")
    scheme = str(given.get("activation_scheme") or "dynamic")
    if scheme not in ("dynamic", "static"):
        raise refused(name, "activation_scheme", scheme, "dynamic, static")
    note = "the checkpoint's static activation scales" if scheme == "static" else ""
    if block is not None:
        note = "a scale for each 128 values of an activation"
    return Fp8Checkpoint(method, "fp8_channel" if block is None else "fp8_block", ignored, note)


def read_float_compressed(name: str, group: Mapping[str, Any], ignored: tuple[str, ...]) -> Fp8Checkpoint:
    """compressed-tensors' 8-bit floats: the one group. Raises ModelError for what is not supported."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    _check_float8(name, "weights", weights)
    strategy = str(weights.get("strategy"))
    if strategy not in STRATEGIES:
        raise refused(name, "weights.strategy", strategy, ", ".join(STRATEGIES))
    if strategy == "block" and list(weights.get("block_structure") or ()) != BLOCK:
        raise refused(name, "weights.block_structure", weights.get("block_structure"), "[128, 128]")
    if not isinstance(inputs, Mapping):
        raise refused(name, "input_activations", inputs, "8-bit floats: weights alone in FP8 are not supported")
    _check_float8(name, "input_activations", inputs)
    note = ""
    if not inputs.get("dynamic"):
        note = "the checkpoint's static activation scales"
    elif inputs.get("strategy") == "group":
        note = "a scale for each group of an activation"
    return Fp8Checkpoint("compressed-tensors", "fp8_block" if strategy == "block" else "fp8_channel", ignored, note)


def _check_float8(name: str, key: str, settings: Mapping[str, Any]) -> None:
    found = (settings.get("num_bits"), settings.get("type"), settings.get("symmetric", True))
    if found != (8, "float", True):
        raise refused(name, key, f"{found[1]}{found[0]}", "symmetric 8-bit floats")
