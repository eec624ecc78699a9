"""What a model gives that does not generate: which states become the vector, and what is done to it.

Read from sentence-transformers' files (modules.json and the folders it names), from config.json, from a GGUF file's
metadata, and from `--pooler-config`, which wins. Without any of them an encoder gives its first token's state, a
decoder its last token's, and vectors are normalized: what vLLM does.

Invariants: torch-free. A module that would change the result and is not understood is a ModelError that names it.
Knows nothing of how states are computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError, RequestError
from stoker_runtime.models.architectures import ARCHITECTURES
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_json
from stoker_runtime.models.encoders.table import CLASSIFIER, encoder_name
from stoker_runtime.models.pair_prompt import PAIR_PROMPTS, PairPrompt


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
    `answers`: the tokens, (no, yes), of which a decoder gives the second for a pair that goes together; None: it has a
    head that scores. `pair_prompt`: the text around a pair. `prompts`: what may stand before a text, by name, and which
    of them does if nothing is said.
    """

    task: Task
    pooling: Pooling
    normalize: bool
    matryoshka: tuple[int, ...] | None = None
    sigmoid: bool = False
    lower_case: bool = False
    max_tokens: int = 0
    answers: tuple[str, str] | None = None
    pair_prompt: PairPrompt | None = None
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str = ""

    def prompt(self, name: str | None) -> str:
        """What stands before a text under the prompt `name`. Raises RequestError for one that is not known."""
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(f"prompt_name is {name!r}; this model's prompts are {known}.", param="prompt_name")
        return self.prompts.get(name or self.default_prompt, "")


# sentence-transformers' switches, in the order in which it looks at them.
_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_OVERRIDES = ("pooling_type", "normalize", "matryoshka_dimensions", "classifier_from_token", "template")
# sentence-transformers' own settings of a model, of which prompts are read.
SETTINGS_FILE = "config_sentence_transformers.json"
# Decoders whose makers trained them to have their vectors cut to any size, and did not write it in their files:
# Qwen3-Embedding, which sentence-transformers' files tell from a Qwen3 that generates.
CUT_DECODERS = ("Qwen3ForCausalLM",)
_ACTIVATIONS = {"sigmoid": True, "identity": False}


def read_pooling(source: ModelSource, config: EngineConfig) -> PoolingSpec | None:
    """How `source` pools under `config`; None for a model that generates. Raises ModelError or ConfigError."""
    encoder = encoder_name(source)
    modules = _modules(source)
    given = [str(name) for name in source.config.get("architectures") or []]
    # GPT2LMHeadModel is a whole decoder.
    bare = any(name.endswith(("Model", CLASSIFIER)) for name in given if name not in ARCHITECTURES)
    scorer = encoder or (f"{scoring_decoder(source)} that scores" if scoring_decoder(source) else None)
    if config.runner == "generate" and scorer is not None:
        raise ConfigError(f"{source.name}: a {scorer} does not generate; leave --runner out.", param="runner")
    if config.runner == "generate" or (config.runner == "auto" and encoder is None and not modules and not bare):
        if config.pooler_config:
            raise ConfigError(
                f"{source.name} generates; --pooler-config needs --runner pooling.", param="pooler_config"
            )
        return None
    if encoder is not None and encoder.endswith(CLASSIFIER):
        return PoolingSpec(Task.SCORE, _scored_state(source), normalize=False, sigmoid=_is_sigmoid(source))
    if scoring_decoder(source) is not None:
        _check_one_label(source)
        found = PoolingSpec(Task.SCORE, Pooling.LAST, normalize=False, sigmoid=_is_sigmoid(source))
        return _overridden(found, config.pooler_config)
    found = PoolingSpec(Task.EMBED, Pooling.CLS if encoder else Pooling.LAST, normalize=True)
    if modules and source.path is not None:
        found = _from_modules(source.path, modules, found)
        found = _with_prompts(source.path, found)
    stated = source.config.get("pooling_type") if encoder and source.kind is SourceKind.GGUF else None
    if stated in tuple(Pooling):
        found = replace(found, pooling=Pooling(stated))
    found = replace(found, matryoshka=_matryoshka(source.config))
    names = source.config.get("architectures") or ()
    if modules and found.matryoshka is None and found.pooling is Pooling.LAST and set(names) & set(CUT_DECODERS):
        found = replace(found, matryoshka=())
    if stated == "none" and "pooling_type" not in config.pooler_config:
        raise ConfigError(
            f"{source.name}: its pooling_type is none, a vector for each token, which is not served; name one with "
            """--pooler-config '{"pooling_type": "mean"}'.""",
            param="pooler_config",
        )
    return _overridden(found, config.pooler_config)


def scoring_decoder(source: ModelSource) -> str | None:
    """The decoder of a `…ForSequenceClassification` that is no encoder: what it would be called if it generated."""
    names = [str(name) for name in source.config.get("architectures") or []]
    if encoder_name(source) is not None or not names or not names[0].endswith(CLASSIFIER):
        return None
    return names[0].removesuffix(CLASSIFIER) + "ForCausalLM"


def _check_one_label(source: ModelSource) -> None:
    """Raises ModelError for a classifier of several labels."""
    labels = source.config.get("id2label") or {}
    count = int(source.config.get("num_labels") or len(labels) or 2)
    if count != 1:
        raise ModelError(f"{source.name}: {count} labels are not supported; a model that scores has one.")


def _with_prompts(folder: Path, found: PoolingSpec) -> PoolingSpec:
    settings = _optional_json(folder / SETTINGS_FILE)
    prompts = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
    default = str(settings.get("default_prompt_name") or "")
    if default and default not in prompts:
        raise ModelError(f"{folder / SETTINGS_FILE}: default_prompt_name is {default!r}, which prompts do not have.")
    return replace(found, prompts=prompts, default_prompt=default)


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
    found = replace(found, pooling=Pooling(kind), normalize=normalize, matryoshka=matryoshka)
    return _judging(found, given)


def _judging(found: PoolingSpec, given: Mapping[str, Any]) -> PoolingSpec:
    """`found` as what `--pooler-config` says of answers and of the prompt around pairs changes it."""
    answers = given.get("classifier_from_token")
    if answers is not None:
        if not (isinstance(answers, list) and len(answers) == 2 and all(isinstance(each, str) for each in answers)):
            raise ConfigError(
                'pooler_config\'s classifier_from_token must be two tokens, as ["no", "yes"].', param="pooler_config"
            )
        found = replace(found, task=Task.SCORE, pooling=Pooling.LAST, sigmoid=True, answers=(answers[0], answers[1]))
    template = given.get("template", "none" if answers is None else "qwen3-reranker")
    if template not in PAIR_PROMPTS or ("template" in given and found.task is not Task.SCORE):
        raise ConfigError(
            f"pooler_config's template is {template!r}; it must be one of {', '.join(PAIR_PROMPTS)}, of a model that "
            "scores pairs.",
            param="pooler_config",
        )
    return replace(found, pair_prompt=PAIR_PROMPTS[template])


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
