"""Adapters of a model: the list that pods follow, and each one's source as a model that is fetched to the same volume.

Invariants: nothing of a pod's template depends on which adapters there are, so a change of them is no rollout; the list
names published folders and digests, no source and no secret. A model's Secret goes to sources of its own kind alone: a
hub's token is no store's key, and nobody else's to see.
Knows nothing of which adapters are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker_operator.manifests.cache import claim_name
from stoker_operator.manifests.identity import Manifest, child, stamped
from stoker_operator.manifests.pod import MODELS, beside_the_engine
from stoker_operator.spec.adapters import Adapter
from stoker_operator.spec.engine_flags import count, given
from stoker_operator.spec.model import Model
from stoker_operator.spec.service import FetchedModel, InferenceService

CONFIG_MAP = ("v1", "ConfigMap")
VOLUME = "adapter-list"
FOLDER = "/etc/stoker/adapters"
FILE = "adapters.json"
FILES = ("adapter_config.json", "adapter_model.safetensors")
# Adapters that one step of an engine may have rows of, where runtime.args say nothing; as the engine, its rank.
SLOTS, RANK = 4, 16


@dataclass(frozen=True, slots=True)
class Listed:
    """An adapter of the list: its folder, relative to the volume, and the digest that it was published under."""

    name: str
    path: str
    digest: str


def list_name(service: InferenceService) -> str:
    """The name of the ConfigMap with the list."""
    return f"{service.name}-adapters"


def adapter_list(service: InferenceService, listed: Sequence[Listed]) -> Manifest:
    """The ConfigMap that the pods mount; kubelets bring what changes in it within a minute or two."""
    carrier = child(service, CONFIG_MAP, list_name(service), "adapters")
    entries = [{"name": each.name, "path": f"{MODELS}/{each.path}", "digest": each.digest} for each in listed]
    text = json.dumps({"adapters": entries}, indent=1)
    return stamped(carrier | {"data": {FILE: text}})


def read_list(live: Mapping[str, Any] | None) -> dict[str, Listed]:
    """What a live list names, by name; what somebody else wrote there is nothing."""
    try:
        raw = json.loads(((live or {}).get("data") or {}).get(FILE, "{}"))
        found = [
            Listed(str(each["name"]), str(each["path"]).removeprefix(f"{MODELS}/"), str(each["digest"]))
            for each in raw.get("adapters", ())
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {each.name: each for each in found}


def listed_as(adapter: Adapter, published: FetchedModel) -> Listed:
    """An adapter that is on the volume."""
    return Listed(adapter.name, published.path, published.digest)


def list_volume(service: InferenceService) -> dict[str, Any]:
    """The volume of the engine's pods that holds the list."""
    return {"name": VOLUME, "configMap": {"name": list_name(service), "defaultMode": 0o444}}


def list_mount() -> dict[str, Any]:
    """Where they see it: a folder, since a single file that is mounted never changes."""
    return {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}


def engine_arguments(service: InferenceService) -> list[str]:
    """What the engine is told of adapters; `runtime.args` stand behind it."""
    if service.model.adapters is None:
        return []
    said = given(service)
    room = [] if "max-loras" in said else ["--max-loras", str(SLOTS)]
    return ["--enable-lora", "--lora-modules-file", f"{FOLDER}/{FILE}", *room]


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine's adapters take: `slots` on its device, `copies` in its host's memory, values of each."""

    slots: int
    copies: int
    values: int


def adapter_room(service: InferenceService, model: FetchedModel) -> Room | None:
    """The room for adapters; None where there is none. `values` is 0 where the model's shape does not tell."""
    if service.model.adapters is None:
        return None
    said = given(service)
    slots = count(said.get("max-loras", "")) or SLOTS
    rank = count(said.get("max-lora-rank", "")) or RANK
    return Room(slots, count(said.get("max-cpu-loras", "")) or slots, rank * model.lora_line)


def as_model(service: InferenceService, adapter: Adapter) -> InferenceService:
    """The service as if the adapter were its model, on the volume that the model has: so one Job fetches either."""
    model = service.model
    scheme = adapter.uri.partition("://")[0]
    kin = scheme == model.scheme
    source = Model(
        uri=adapter.uri,
        revision=adapter.revision,
        secret_ref=model.secret_ref if kin else None,
        service_account=model.service_account if kin else "",
        endpoint=model.endpoint if kin else "",
        allow=FILES,
    )
    cache = replace(service.cache, mode="PVC", existing_claim=claim_name(service), verify="OnDownload")
    placement = replace(service.placement, affinity=beside_the_engine(service, dict(service.placement.affinity)))
    return replace(service, model=source, cache=cache, placement=placement)
