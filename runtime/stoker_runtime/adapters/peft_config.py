"""What a PEFT folder's adapter_config.json says: ranks, scales, and which modules it changes.

Invariants: torch-free. A setting that changes the result and is not understood is a ModelError that names it. Modules
are matched as PEFT matches them, by names within the base model ("model.layers.0.self_attn.q_proj").
Knows nothing of tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_runtime.errors import ModelError

CONFIG = "adapter_config.json"
MAX_RANK = 256
ALL_LINEAR = "all-linear"

# Settings that change what the adapter computes, with the values under which they change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
    "velora_config": (None, {}),
    "monteclora_config": (None, {}),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "ensure_weight_tying": (False, None),
}
# Ways to begin training that change the base model's weights, so that the adapter belongs to other ones than these.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """A LoRA adapter as its configuration describes it. `target_modules` is a regular expression, or names' ends."""

    rank: int
    alpha: float
    rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of `module`'s matrices."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of `module`'s matrices is multiplied with: alpha / r, or alpha / √r (rsLoRA)."""
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return float(alpha / rank**0.5) if self.rslora else alpha / rank

    def targets(self, modules: Iterable[str], head: str) -> list[str]:
        """Those of the model's `modules` that the adapter changes. `head` is the output head's name."""
        return [module for module in modules if self._targets(module, head)]

    def _targets(self, module: str, head: str) -> bool:
        if _excluded(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == ALL_LINEAR:
                # As PEFT: all linear layers but the output's; the embedding is none.
                return module != head and not module.endswith(("embed_tokens", "embeddings"))
            return re.fullmatch(self.target_modules, module) is not None
        if module in self.target_modules:
            return True
        found = any(module.endswith(f".{name}") for name in self.target_modules)
        return found and (self.layers is None or self._layer(module) in self.layers)

    def _layer(self, module: str) -> int:
        """The layer that a module belongs to; −1 for none."""
        for pattern in self.layers_pattern or (r"[^.]*",):
            match = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
            if match is not None:
                return int(match[1])
        return -1


def read_peft_config(folder: Path) -> PeftConfig:
    """The configuration in `folder`. Raises ModelError naming the file and the key."""
    file = folder / CONFIG
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: there is no {CONFIG}, so this is no folder of a PEFT adapter.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: it is not an object.")
    _refuse(file, values)
    try:
        config = _config(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{file}: it is not usable: {error!r}.") from error
    _check(file, config)
    return config


def _refuse(file: Path, values: Mapping[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type is {kind!r}; only LORA is served.", param="peft_type")
    for key, harmless in _HARMLESS.items():
        if key in values and values[key] not in harmless:
            raise ModelError(f"{file}: {key} is {json.dumps(values[key])}, which is not supported.", param=key)
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{file}: init_lora_weights is {start!r}, which changes the base model's weights; convert the adapter to a "
            "plain one (PEFT's path_initial_model_for_weight_conversion).",
            param="init_lora_weights",
        )


def _config(values: Mapping[str, Any]) -> PeftConfig:
    layers = values.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    pattern = values.get("layers_pattern") or ()
    return PeftConfig(
        rank=int(values["r"]),
        alpha=float(values.get("lora_alpha", 8)),
        rslora=bool(values.get("use_rslora", False)),
        target_modules=_names(values["target_modules"]),
        exclude_modules=_names(values.get("exclude_modules") or ()),
        rank_pattern=dict(values.get("rank_pattern") or {}),
        alpha_pattern=dict(values.get("alpha_pattern") or {}),
        layers=tuple(map(int, layers)) if layers else None,
        layers_pattern=(pattern,) if isinstance(pattern, str) else tuple(pattern),
    )


def _names(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(map(str, value))


def _check(file: Path, config: PeftConfig) -> None:
    ranks = [config.rank, *(config.rank_pattern or {}).values()]
    if not all(isinstance(rank, int) and 1 <= rank <= MAX_RANK for rank in ranks):
        raise ModelError(f"{file}: r is {max(ranks)}; ranks from 1 to {MAX_RANK} are served.", param="r")
    expressions = [config.target_modules, config.exclude_modules, *(config.rank_pattern or {})]
    for expression in (each for each in (*expressions, *(config.alpha_pattern or {})) if isinstance(each, str)):
        try:
            re.compile(expression)
        except re.error as error:
            raise ModelError(f"{file}: {expression!r} is no regular expression: {error}.") from error


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that `module` ends with, as PEFT looks it up."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def _excluded(excluded: str | tuple[str, ...], module: str) -> bool:
    if isinstance(excluded, str):
        return re.fullmatch(excluded, module) is not None
    return module in excluded or any(module.endswith(f".{name}") for name in excluded)
