"""Reads the YAML files that `stoker up` is given.

Invariants: every document is either used or refused by name; a problem names its file.
Knows nothing of how they are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker_operator.local.process import plain_values
from stoker_operator.spec.service import KIND, SpecError, parse

Object = dict[str, Any]


class ManifestError(Exception):
    """A file that cannot be run; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """What the files hold: InferenceServices, and the values of Secrets and ConfigMaps by name and key."""

    services: list[Object] = field(default_factory=list)
    secrets: dict[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    config_maps: dict[str, Mapping[str, str]] = field(default_factory=dict)


def load(paths: Sequence[Path]) -> Manifests:
    """Read and validate all files. Raises ManifestError."""
    found = Manifests()
    for path in paths:
        for document in _documents(path):
            _sort_in(path, document, found)
    names = [service["metadata"]["name"] for service in found.services]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ManifestError(f"The InferenceService {twice!r} is given twice.")
    if not names:
        raise ManifestError(f"There is no {KIND} in {', '.join(map(str, paths))}.")
    return found


def runnable(found: Manifests) -> None:
    """Refuse what only a cluster can run. Raises ManifestError."""
    for service in found.services:
        name, template = service["metadata"]["name"], parse(service).pod_template
        if template.sidecars or template.init_containers:
            text = "`stoker up` runs Stoker's own containers as processes, and no image"
            raise ManifestError(f"The {KIND} {name!r} has podTemplate.spec containers of its own; {text}.")
        if parse(service).model.adapters is not None:
            text = "`stoker up` has no ConfigMaps for pods to follow; run `stoker serve` with --lora-modules"
            raise ManifestError(f"The {KIND} {name!r} has model.adapters; {text}.")
        if parse(service).endpoint.pod_tls is not None:
            text = "`stoker up` serves this machine alone, by HTTP; leave it out"
            raise ManifestError(f"The {KIND} {name!r} has endpoint.podTLS; {text}.")
        if parse(service).endpoint.kv_events is not None:
            text = "`stoker up` serves this machine alone, where no picker follows events; leave it out"
            raise ManifestError(f"The {KIND} {name!r} has endpoint.inferencePool.kvEvents; {text}.")
        if parse(service).cache.mode == "Image":
            text = "`stoker up` mounts no images; leave it out and name the model by another URI"
            raise ManifestError(f"The {KIND} {name!r} has cache.mode: Image; {text}.")
        if parse(service).resources.spans_nodes:
            text = "`stoker up` runs on this machine alone; run `stoker serve` with --nnodes on each"
            raise ManifestError(f"The {KIND} {name!r} has resources.nodes of more than 1; {text}.")
        if parse(service).resources.claims:
            text = "`stoker up` takes the GPUs that are there; give resources.gpus"
            raise ManifestError(f"The {KIND} {name!r} has resources.claims; {text}.")


def _documents(path: Path) -> list[Object]:
    try:
        documents = [item for item in yaml.safe_load_all(path.read_text()) if item is not None]
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} is no YAML: {error}") from None
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
            raise ManifestError(f"{path} holds a document that is no Kubernetes object (apiVersion, kind, metadata).")
    return documents


def _sort_in(path: Path, document: Object, found: Manifests) -> None:
    kind, name = document.get("kind"), document["metadata"].get("name")
    if kind == KIND:
        document["metadata"].setdefault("namespace", "default")
        document["metadata"].pop("uid", None)
        try:
            parse(document)
        except SpecError as error:
            listed = "\n".join(f"  {problem}" for problem in error.problems)
            raise ManifestError(f"{path}: the {KIND} {name!r} cannot be used:\n{listed}") from None
        found.services.append(document)
    elif kind == "Secret":
        found.secrets[str(name)] = plain_values(document)
    elif kind == "ConfigMap":
        found.config_maps[str(name)] = plain_values(document)
    else:
        raise ManifestError(
            f"{path} holds a {kind}; `stoker up` runs {KIND}, with the Secrets and ConfigMaps it refers to."
        )
