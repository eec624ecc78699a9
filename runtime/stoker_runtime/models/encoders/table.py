"""The table of encoders: Hugging Face architecture → how its spec is read.

Invariants: torch-free. A model is served only if its architecture stands here and every setting that changes the
result is understood; anything else is a ModelError that names it and what is supported.
Knows nothing of pooling, and nothing of decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.encoders.absolute import read_bert, read_roberta
from stoker_runtime.models.encoders.names import GGUF_BERT, GGUF_MODERN_BERT, GGUF_NOMIC, EncoderNames
from stoker_runtime.models.encoders.rotary import read_gte, read_modern_bert, read_nomic
from stoker_runtime.models.encoders.spec import EncoderSpec

HEADLESS = ("Model", "ForMaskedLM")
CLASSIFIER = "ForSequenceClassification"
EVERY = (*HEADLESS, CLASSIFIER)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's configuration is read, what its heads are called, and for people which models it has; `gguf` is
    what GGUF files call its tensors.
    """

    read: Callable[[Mapping[str, Any]], EncoderSpec]
    kinds: tuple[str, ...]
    models: str
    gguf: EncoderNames | None = None


FAMILIES = {
    "Bert": Family(
        read_bert, EVERY, "BERT, all-MiniLM, E5, BGE v1.5, gte v1, mxbai-embed, ms-marco cross-encoders", GGUF_BERT
    ),
    "Roberta": Family(read_roberta, EVERY, "RoBERTa, all-distilroberta"),
    "XLMRoberta": Family(read_roberta, EVERY, "XLM-RoBERTa, multilingual E5, BGE M3 (dense), BGE reranker v2 M3"),
    "Camembert": Family(read_roberta, EVERY, "CamemBERT"),
    "ModernBert": Family(
        read_modern_bert, EVERY, "ModernBERT, gte-modernbert and its reranker, modernbert-embed", GGUF_MODERN_BERT
    ),
    "NomicBert": Family(read_nomic, ("Model",), "nomic-embed-text v1 and v1.5", GGUF_NOMIC),
    "New": Family(read_gte, EVERY, "gte v1.5 (en), gte-multilingual and its reranker"),
    "Gte": Family(read_gte, EVERY, "the same as transformers calls them, snowflake-arctic-embed-m v2.0"),
}
ENCODERS = {f"{family}{kind}": each.models for family, each in FAMILIES.items() for kind in each.kinds}
"""What the models are that have an architecture, for docs/reference/models.md."""


def encoder_name(source: ModelSource) -> str | None:
    """The architecture of `source` if it is an encoder of this table."""
    return next((name for name in source.config.get("architectures") or [] if name in ENCODERS), None)


def build_encoder(source: ModelSource) -> EncoderSpec:
    """The spec of an encoder. Raises ModelError for a setting that is missing or not supported."""
    name = encoder_name(source)
    if name is None or source.kind is SourceKind.SHAPE:
        raise ModelError(f"{source.name}: no encoder; known are {', '.join(ENCODERS)}.", param="model")
    if source.config.get("quantization_config"):
        raise ModelError(f"{source.name}: quantized encoders are not supported.", param="quantization_config")
    config = {**source.config, "architectures": [name]}
    try:
        _refuse_labels(name, config)
        family = next(each for prefix, each in FAMILIES.items() if name.startswith(prefix))
        spec = family.read(config)
    except KeyError as error:
        raise ModelError(f"{source.name}: the configuration lacks {error}.", param=str(error.args[0])) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source.name}: the configuration is not usable: {error}.") from error
    if source.kind is not SourceKind.GGUF:
        return spec
    assert family.gguf is not None, "what is read from GGUF has names there"
    return replace(spec, names=family.gguf)


def _refuse_labels(name: str, config: Mapping[str, Any]) -> None:
    labels = int(config.get("num_labels") or len(config.get("id2label") or "ab"))
    if name.endswith(CLASSIFIER) and labels != 1:
        raise ModelError(
            f"{name} with {labels} labels is not supported; served are cross-encoders, which have one.",
            param="num_labels",
        )
