"""What a model gives that does not generate: which states become the vector, and what is done to it.

Read from sentence-transformers' files (modules.json and the folders it names), from config.json, and from
`--pooler-config`, which wins. Without any of them an encoder gives its first token's state, a decoder its last
token's, and vectors are normalized: what vLLM does.

Invariants: torch-free. A module that would change the result and is not understood is a ModelError that names it.
Knows nothing of how states are computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError, RequestError
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_json
from stoker_runtime.models.encoders.table import CLASSIFIER, encoder_name


class Task(StrEnum):
    """What a model does with a text."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class Pooling(StrEnum):
    """Which of a text's states become its vector."""

    CLS = "cls"
    LAST = "last"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """A model that embeds texts, or scores pairs of them.

    `matryoshka`: sizes to which its vectors may be cut; None: to none, (): to any. `sigmoid`: scores pass through it.
    `lower_case`: texts are lowered before they are encoded. `max_tokens`: the longest text by the model's own files.
    """

    task: Task
    pooling: Pooling
    normalize: bool
    matryoshka: tuple[int, ...] | None = None
    sigmoid: bool = False
    lower_case: bool = False
    max_tokens: int = 0


# sentence-transformers' switches, in the order in which it looks at them.
_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_OVERRIDES = ("pooling_type", "normalize", "matryoshka_dimensions")
_ACTIVATIONS = {"sigmoid": True, "identity": False}


def read_pooling(source: ModelSource, config: EngineConfig) -> PoolingSpec | None:
    """How `source` pools under `config`; None for a model that generates. Raises ModelError or ConfigError."""
    encoder = encoder_name(source)
    modules = _modules(source)
    bare = any(name.endswith("Model") for name in source.config.get("architectures") or [])
    if config.runner == "generate" and encoder is not None:
        raise ConfigError(f"{source.name}: a {encoder} does not generate; leave --runner out.", param="runner")
    if config.runner == "generate" or (config.runner == "auto" and encoder is None and not modules and not bare):
        if config.pooler_config:
            raise ConfigError(
                f"{source.name} generates; --pooler-config needs --runner pooling.", param="pooler_config"
            )
        return None
    if encoder is not None and encoder.endswith(CLASSIFIER):
        return PoolingSpec(Task.SCORE, _scored_state(source), normalize=False, sigmoid=_is_sigmoid(source))
    found = PoolingSpec(Task.EMBED, Pooling.CLS if encoder else Pooling.LAST, normalize=True)
    if modules and source.path is not None:
        found = _from_modules(source.path, modules, found)
    found = replace(found, matryoshka=_matryoshka(source.config))
    return _overridden(found, config.pooler_config)


def check_dimensions(pooling: PoolingSpec, dimensions: int | None) -> None:
    """Raise RequestError for a size to which the model's vectors may not be cut."""
    if dimensions is None:
        return
    if pooling.matryoshka is None or pooling.task is not Task.EMBED:
        raise RequestError(
            "dimensions is not supported by this model: it was not trained to have its vectors cut (Matryoshka).",
            param="dimensions",
        )
    if pooling.matryoshka and dimensions not in pooling.matryoshka:
        sizes = ", ".join(map(str, pooling.matryoshka))
        raise RequestError(f"dimensions must be one of {sizes}; got {dimensions}.", param="dimensions")


def _modules(source: ModelSource) -> list[Any]:
    if source.kind is not SourceKind.FOLDER or source.path is None or not (source.path / "modules.json").is_file():
        return []
    path = source.path / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path}: must be a list of modules.")
    return modules


def _from_modules(folder: Path, modules: list[Mapping[str, Any]], base: PoolingSpec) -> PoolingSpec:
    """`base` as the modules of sentence-transformers change it."""
    found = replace(base, normalize=False)
    for module in modules:
        kind, place = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            settings = _optional_json(place / "sentence_bert_config.json")
            found = replace(
                found,
                lower_case=bool(settings.get("do_lower_case", False)),
                max_tokens=int(settings.get("max_seq_length") or 0),
            )
        elif kind == "Pooling":
            found = replace(found, pooling=_mode(place / "config.json"))
        elif kind == "Normalize":
            found = replace(found, normalize=True)
        else:
            raise ModelError(
                f"{folder / 'modules.json'}: the module {kind or 'without a type'} is not supported; "
                "known are Transformer, Pooling and Normalize."
            )
    return found


def _mode(path: Path) -> Pooling:
    settings = read_json(path)
    if "pooling_mode" in settings:
        chosen = {str(settings["pooling_mode"])}
        known: dict[str, Pooling] = {"lasttoken": Pooling.LAST} | {str(mode): mode for mode in Pooling}
    else:
        chosen = {key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True}
        known = dict(_MODES)
    if len(chosen) != 1 or not chosen <= set(known):
        raise ModelError(
            f"{path}: pooling by {' and '.join(sorted(chosen)) or 'nothing'} is not supported; "
            f"it must be one of {', '.join(known)}."
        )
    if settings.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt false is not supported.")
    return known[chosen.pop()]


def _scored_state(source: ModelSource) -> Pooling:
    """What a cross-encoder's head reads: the first state, or the mean where its configuration says so."""
    asked = source.config.get("classifier_pooling", Pooling.CLS)
    if asked not in (Pooling.CLS, Pooling.MEAN):
        raise ModelError(f"{source.name}: classifier_pooling {asked!r} is not supported; known: cls, mean.")
    return Pooling(asked)


def _is_sigmoid(source: ModelSource) -> bool:
    """A cross-encoder's activation: sentence-transformers' own setting, or else its default for one label."""
    nested = source.config.get("sentence_transformers") or {}
    name = nested.get("activation_fn") or source.config.get("sbert_ce_default_activation_function") or "Sigmoid"
    short = str(name).rpartition(".")[2].lower()
    if short not in _ACTIVATIONS:
        raise ModelError(f"{source.name}: the score's activation {name} is not supported; known: Sigmoid, Identity.")
    return _ACTIVATIONS[short]


def _matryoshka(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    if sizes := config.get("matryoshka_dimensions"):
        return tuple(int(size) for size in sizes)
    return () if config.get("is_matryoshka") else None


def _overridden(found: PoolingSpec, text: str) -> PoolingSpec:
    """`found` as `--pooler-config` changes it. Raises ConfigError naming the key."""
    if not text:
        return found
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"pooler_config is not valid JSON: {error}.", param="pooler_config") from error
    if not isinstance(given, dict) or not set(given) <= set(_OVERRIDES):
        raise ConfigError(f"pooler_config must be an object of {', '.join(_OVERRIDES)}.", param="pooler_config")
    kind = str(given.get("pooling_type", found.pooling)).lower()
    if kind not in tuple(Pooling):
        raise ConfigError(f"pooling_type is {kind!r}; it must be one of {', '.join(Pooling)}.", param="pooler_config")
    normalize, sizes = given.get("normalize", found.normalize), given.get("matryoshka_dimensions")
    if not isinstance(normalize, bool):
        raise ConfigError("pooler_config's normalize must be true or false.", param="pooler_config")
    if sizes is not None and not (isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)):
        raise ConfigError("pooler_config's matryoshka_dimensions must be a list of sizes.", param="pooler_config")
    matryoshka = found.matryoshka if sizes is None else tuple(sizes)
    return replace(found, pooling=Pooling(kind), normalize=normalize, matryoshka=matryoshka)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
