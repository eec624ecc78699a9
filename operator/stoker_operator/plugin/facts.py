"""What is known of a model that nobody has fetched here: its bytes and its shape, from the service's status, from a
preset of the same source, or from what the user says.

Invariants: pure; what stands in for a digest or a commit is recognizable: zeros.
Knows nothing of manifests' children.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from stoker_operator.manifests.weight_memory import KINDS
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.presets import Preset
from stoker_operator.spec.model import METHODS
from stoker_operator.spec.quantity import is_quantity, quantity
from stoker_operator.spec.service import FetchedModel, InferenceService, remembered_model
from stoker_operator.spec.weights import told_weights

ZEROS = "0" * 64
SHAPE = {"layers": "layers", "kvHeads": "kv_heads", "headDim": "head_dim", "maxContext": "max_context"}


def stand_in(service: InferenceService) -> FetchedModel:
    """A model of which nothing is known but where it comes from."""
    path = f"sha256-{ZEROS}"
    found = re.search(r"/([^/]+\.gguf)$", service.model.uri)
    serve = f"{path}/{found[1]}" if found else path
    return FetchedModel("0" * 40, f"sha256:{ZEROS}", 0, path, serve)


def facts_of(service: InferenceService, catalog: Sequence[Preset], weights: str, shape: str) -> FetchedModel:
    """The model's facts. `weights` (a quantity: what they take as the service quantizes them) and `shape`
    ("layers=28,kvHeads=4,headDim=128,maxContext=32768") go before what is known. Raises PluginError for values that
    say nothing.
    """
    known = remembered_model(service.status)
    if known is None:
        presets = [each for each in catalog if each.serves(service)]
        alike = [each for each in presets if each.service.model.quantization == service.model.quantization]
        known = _with(stand_in(service), presets[0].facts) if presets else stand_in(service)
        # What weights take is known as a preset quantizes them.
        known = _taking(known, service, alike[0].taken) if alike and alike[0].taken else known
    if weights:
        if not is_quantity(weights):
            raise PluginError(f"--weights {weights!r} is not a quantity such as 15Gi or 16100M.")
        known = _taking(replace(known, bytes=int(quantity(weights))), service, int(quantity(weights)))
    return _with(known, _shape(shape)) if shape else known


def _taking(model: FetchedModel, service: InferenceService, size: int) -> FetchedModel:
    """The model with weights of `size` bytes as the service quantizes them."""
    method = METHODS.get(service.model.quantization, "")
    return replace(model, weights=told_weights(size, ("auto", *KINDS.values()), method))


def _with(model: FetchedModel, numbers: Mapping[str, int]) -> FetchedModel:
    """The model with some of its numbers."""
    found: FetchedModel = replace(model, **cast("dict[str, Any]", dict(numbers)))
    return found


def _shape(text: str) -> dict[str, int]:
    found = dict(re.findall(r"(\w+)=(\d+)(?:,|$)", text))
    if set(found) != set(SHAPE):
        raise PluginError(f"--shape {text!r} must name {', '.join(SHAPE)}, as in layers=28,kvHeads=4,…")
    return {field: int(found[key]) for key, field in SHAPE.items()}
