"""What a configuration says of a checkpoint whose weights are floats of four bits: NVFP4 and MXFP4, as
compressed-tensors and ModelOpt write them.

Invariants: torch-free. A setting under which the stored numbers would mean something else is a ModelError that names
it. Activations keep 16 bits, whatever the checkpoint suggests: `note` says so where that is not what it was made for.
Knows nothing of tensors; which weights are left alone it is asked by module name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from stoker_runtime.models.quantization.fp4_scheme import BLOCKS, Fp4Scheme
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.module_names import is_matched
from stoker_runtime.models.quantization.refusal import refused

MODELOPT = "modelopt"
FORMATS: dict[str, Literal["nvfp4", "mxfp4"]] = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
"""compressed-tensors' formats."""
STRATEGIES = {"nvfp4": "tensor_group", "mxfp4": "group"}
ALGORITHMS: dict[str, Literal["nvfp4", "mxfp4"]] = {
    "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP4": "mxfp4", "W4A8_MXFP4_FP8": "mxfp4",
}  # fmt: skip
"""ModelOpt's algorithms of four bits."""
FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
ACTIVATIONS = {"NVFP4": "the checkpoint's 4-bit activations", "W4A8_MXFP4_FP8": "the checkpoint's 8-bit activations"}


class Fp4Layout(StrEnum):
    """Whose names the tensors have; `weights/packed/fp4_files.py` reads each."""

    COMPRESSED = "compressed-tensors"
    MODELOPT = MODELOPT


@dataclass(frozen=True, slots=True)
class Fp4Checkpoint:
    """`ignored` names the modules that are not quantized, `re:` before a regular expression, `*` for any letters."""

    layout: Fp4Layout
    scheme: Fp4Scheme
    ignored: tuple[str, ...] = ()
    note: str = ""

    @property
    def method(self) -> str:
        """What `--quantization` calls it."""
        return self.layout.value

    @property
    def kind(self) -> Literal["nvfp4", "mxfp4"]:
        """How its weights rest in memory."""
        return self.scheme.kind

    @property
    def described(self) -> str:
        """What its weights are, in words."""
        return self.kind.upper()

    def leaves(self, module: str) -> bool:
        """Whether the weight of `module` (`model.layers.0.mlp.up_proj`) is not quantized."""
        return any(is_matched(pattern, module) for pattern in self.ignored)


def read_fp4_compressed(name: str, group: Mapping[str, Any], form: str, ignored: tuple[str, ...]) -> Fp4Checkpoint:
    """compressed-tensors' 4-bit floats: the one group. Raises ModelError for what is not supported."""
    weights = group.get("weights") or {}
    if form not in FORMATS:
        raise refused(name, "format", form, f"{', '.join(FORMATS)} for 4-bit floats")
    kind = FORMATS[form]
    if not weights.get("symmetric", True):
        raise refused(name, "weights.symmetric", False, f"true with {kind.upper()}")
    if weights.get("strategy") != STRATEGIES[kind]:
        raise refused(name, "weights.strategy", weights.get("strategy"), f"{STRATEGIES[kind]} with {kind.upper()}")
    _check_group(name, weights.get("group_size"), kind)
    note = "the checkpoint's 4-bit activations" if group.get("input_activations") else ""
    return Fp4Checkpoint(Fp4Layout.COMPRESSED, Fp4Scheme(kind), ignored, note)


def read_modelopt(name: str, given: Mapping[str, Any]) -> Fp4Checkpoint | Fp8Checkpoint:
    """ModelOpt's settings, of config.json or of hf_quant_config.json. Raises ModelError for what is not supported."""
    settings, ignored = modelopt_settings(given)
    algorithm = str(settings.get("quant_algo"))
    if algorithm in FP8_ALGORITHMS:
        note = "the checkpoint's static activation scales" if algorithm == "FP8" else ""
        return Fp8Checkpoint(MODELOPT, "fp8_channel", ignored, note)
    if algorithm not in ALGORITHMS:
        raise refused(name, "quant_algo", algorithm, f"one of {', '.join((*ALGORITHMS, *FP8_ALGORITHMS))}")
    kind = ALGORITHMS[algorithm]
    groups = [settings.get("group_size")]
    for each in (settings.get("config_groups") or {}).values():
        groups.append((each.get("weights") or {}).get("group_size"))
    for size in groups:
        if size is not None:
            _check_group(name, size, kind)
    return Fp4Checkpoint(Fp4Layout.MODELOPT, Fp4Scheme(kind), ignored, ACTIVATIONS.get(algorithm, ""))


def modelopt_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """ModelOpt's settings, of either file, and the modules that it left alone."""
    inner = given.get("quantization")
    settings = {**given, **inner} if isinstance(inner, Mapping) else dict(given)
    return settings, tuple(str(each) for key in ("ignore", "exclude_modules") for each in settings.get(key) or ())


def _check_group(name: str, size: object, kind: str) -> None:
    if size != BLOCKS[kind]:
        raise refused(name, "group_size", size, f"{BLOCKS[kind]} with {kind.upper()}")
