"""Writes the JSON schemas that kubeconform checks against from the API server itself: no network, and exactly the
version that runs. Strict: a field that the API does not know is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOCATION = "{{ .Group }}-{{ .ResourceAPIVersion }}-{{ .ResourceKind }}.json"


def write(folder: Path, openapi: dict[str, Any]) -> None:
    """One file for each kind of an OpenAPI v2 document, and one with all definitions that they refer to."""
    definitions = {name: _strict(item) for name, item in openapi["definitions"].items()}
    (folder / "definitions.json").write_text(json.dumps({"definitions": definitions}))
    for name, item in openapi["definitions"].items():
        for kind in item.get("x-kubernetes-group-version-kind", ()):
            # kubeconform takes what stands before the slash of an apiVersion, of "v1" all of it, for the group.
            file = f"{kind['group'] or kind['version']}-{kind['version']}-{kind['kind'].lower()}.json"
            reference = f"definitions.json#/definitions/{name}"
            (folder / file).write_text(json.dumps({"$ref": reference}))


def _strict(definition: dict[str, Any]) -> dict[str, Any]:
    """No unknown property where the properties are listed; formats that JSON Schema does not know are left out."""
    cleaned: dict[str, Any] = json.loads(json.dumps(definition))
    if "properties" in cleaned:
        cleaned.setdefault("additionalProperties", False)
        for item in cleaned["properties"].values():
            if item.get("format") == "int-or-string":
                item.pop("type", None)
    if cleaned.get("format") == "int-or-string":
        cleaned.pop("type", None)
    if definition.get("format") == "quantity" or "x-kubernetes-int-or-string" in definition:
        cleaned.pop("type", None)
    return cleaned
