"""From a configuration to the spec of its architecture, checked and with what its checkpoint is quantized in.

Invariants: torch-free. A model is served only if its architecture stands in the table and every setting that changes
the result is understood; anything else is a ModelError that names it and what is supported.
Knows nothing of how a single architecture is read.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.quantized import quantized
from stoker_runtime.models.architectures.table import ARCHITECTURES, REFUSED
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.quantization.quantized_checkpoint import read_quantization
from stoker_runtime.models.spec import ModelSpec

log = logging.getLogger(__name__)
TABLE = "stoker_runtime/models/architectures"


def build_spec(source: ModelSource) -> ModelSpec:
    """The spec of a model. Raises ModelError for an unknown architecture, setting or quantization."""
    architectures = source.config.get("architectures") or ["none"]
    known = [name for name in architectures if name in ARCHITECTURES]
    if not known:
        raise ModelError(f"{source.name}: {_unknown(architectures)}", param="model")
    checkpoint = read_quantization(source.name, source.config, packed_experts="GptOssForCausalLM" in known)
    row = ARCHITECTURES[known[0]]
    config = {**row.defaults, **source.config, "architectures": known}
    try:
        spec = row.build(config)
    except KeyError as error:
        raise ModelError(f"{source.name}: the configuration lacks {error}.", param=str(error.args[0])) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{source.name}: the configuration is not usable: {error}.") from error
    spec = replace(_checked(source.name, spec), eos_token_ids=_eos_ids(source, spec.vocab))
    return spec if checkpoint is None else quantized(spec, checkpoint, row)


def _unknown(architectures: Sequence[str]) -> str:
    """Names what is not served, the nearest that is, and where a row would go."""
    asked = ", ".join(architectures)
    reason = next((f": {REFUSED[name]}" for name in architectures if name in REFUSED), "")
    near = nearest(architectures[0], ARCHITECTURES)
    return (
        f"architecture {asked} is not supported{reason}.{near} Supported are {', '.join(sorted(ARCHITECTURES))}: "
        f"the rows of {TABLE}, where one that the decoder can run is added."
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence on the one of `known` that is spelled most like `name`; empty where none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" The nearest is {near[0]}." if near else ""


def _checked(name: str, spec: ModelSpec) -> ModelSpec:
    if spec.heads % spec.kv_heads:
        raise ModelError(f"{name}: {spec.heads} query heads cannot share {spec.kv_heads} key-value heads evenly.")
    if len(spec.windows) != spec.num_layers:
        raise ModelError(f"{name}: layer_types has {len(spec.windows)} entries for {spec.num_layers} layers.")
    for rope in {spec.rope_of(layer) for layer in range(spec.num_layers)}:
        if rope.dim % 2 or rope.dim > spec.head_dim:
            raise ModelError(f"{name}: {rope.dim} rotary dimensions do not fit heads of {spec.head_dim}.")
    return spec


def _eos_ids(source: ModelSource, vocab: int) -> tuple[int, ...]:
    """The union of config.json's and generation_config.json's: either may name only one of a chat model's ends.

    Without those that the model cannot write, because its vocabulary ends before them.
    """
    ids: list[int] = []
    for config in (source.config, source.generation):
        value = config.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids += [int(token) for token in values if token is not None and int(token) not in ids]
    beyond = [token for token in ids if not 0 <= token < vocab]
    if beyond:
        log.warning("%s: eos_token_id %s lies beyond the vocabulary of %d; it is left out", source.name, beyond, vocab)
    return tuple(token for token in ids if token not in beyond)
