"""What an image of a registry says of the model in it, for pods that mount the image as a volume.

    the manifest's digest     stands for the commit; of an index, the index's own, since nodes choose by their platform
    the label `dev.stoker.model` of its configuration     {"bytes", "serve", "shape"}, as layout.py writes it

Invariants: no layer is read; an artifact, which container runtimes cannot mount, is refused.
Knows nothing of pods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker_runtime.fetch.errors import BadRequest, FetchFailed
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.registry.repository import DIGEST, Repository

LABEL = "dev.stoker.model"
CONFIGURATIONS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)


@dataclass(frozen=True, slots=True)
class ModelImage:
    """An image with a model. `bytes` are the model's, or those of the layers where no label tells; `serve` is relative
    to the image's root, "" = the root or not told; `shape` is {} where it is not told.
    """

    digest: str
    bytes: int
    serve: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)


def look_into(reference: Reference, endpoint: str = "", revision: str = "") -> ModelImage:
    """What a registry says of an image; `revision` counts where it is a manifest's digest.

    Raises FetchError, Transient; BadRequest for an artifact.
    """
    there = Repository(reference, endpoint)
    try:
        digest, manifest = there.manifest(revision if DIGEST.fullmatch(revision) else "")
        if "manifests" in manifest:
            manifest = there.manifest(_first_image(manifest["manifests"], reference.text))[1]
        layers, config = manifest.get("layers"), manifest.get("config")
        if not isinstance(layers, list) or not isinstance(config, Mapping):
            raise FetchFailed(f"{reference.text}: {there.registry} answered with no manifest of layers.")
        if config.get("mediaType") not in CONFIGURATIONS:
            raise BadRequest(
                f"{reference.text} is an artifact of files and no image, which alone nodes can mount. `stoker fetch "
                "URI --image DIR` makes an image; an artifact is fetched with another cache.mode."
            )
        labels = (there.document(str(config.get("digest", ""))).get("config") or {}).get("Labels") or {}
        told = _told(labels, reference.text)
        size = sum(int(layer.get("size", 0)) for layer in layers if isinstance(layer, Mapping))
        shape = {str(key): value for key, value in (told.get("shape") or {}).items() if isinstance(value, int | dict)}
        return ModelImage(digest, int(told.get("bytes", size)), str(told.get("serve", "")), shape)
    except (TypeError, ValueError, AttributeError):
        raise FetchFailed(f"{reference.text}: its manifest, or its label {LABEL}, is damaged.") from None
    finally:
        there.close()


def _first_image(entries: Any, text: str) -> str:
    """The digest of one of an index's images, which have one model. Builders put attestations beside them."""
    for entry in entries:
        if (entry.get("platform") or {}).get("os") != "unknown":
            return str(entry["digest"])
    raise BadRequest(f"{text} names no image.")


def _told(labels: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    told = json.loads(labels[LABEL]) if LABEL in labels else {}
    if not isinstance(told, Mapping):
        raise BadRequest(f"{text}: its label {LABEL} is no JSON object.")
    return told
