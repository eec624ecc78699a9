"""What spec.podTemplate adds to the engine's pods, merged last.

Invariants: pure. What the operator says of its own containers and volumes stays; every container keeps the restricted
profile: what is merged may choose a user or a profile, never a privilege.
Knows nothing of what the containers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator.manifests.pod import CONTAINER_SECURITY
from stoker_operator.spec.pod_template import PodTemplate

Object = Mapping[str, Any]
# What the profile asks of every container; a root that can be written to is the image's own affair.
_LEAST: Object = {key: value for key, value in CONTAINER_SECURITY.items() if key != "readOnlyRootFilesystem"}


def merge_pod_template(spec: Object, template: PodTemplate) -> dict[str, Any]:
    """A pod's spec with what the template adds."""
    merged = dict(spec)
    engine = next((item for item in template.containers if item["name"] == "engine"), {})
    own = [_engine(item, engine) if item["name"] == "engine" else dict(item) for item in spec["containers"]]
    merged["containers"] = [*own, *map(_restricted, template.sidecars)]
    merged["initContainers"] = [*spec["initContainers"], *map(_restricted, template.init_containers)]
    merged["volumes"] = [*spec["volumes"], *map(dict, template.volumes)]
    if template.security:
        merged["securityContext"] = dict(spec["securityContext"]) | dict(template.security)
    return merged


def _engine(container: Object, more: Object) -> dict[str, Any]:
    """The engine's container with further mounts, resources and settings of security."""
    found = dict(container)
    if more.get("volumeMounts"):
        found["volumeMounts"] = [*container["volumeMounts"], *more["volumeMounts"]]
    for key, values in (more.get("resources") or {}).items():
        found["resources"] = found["resources"] | {key: {**values, **found["resources"].get(key, {})}}
    if more.get("securityContext"):
        found["securityContext"] = _security(CONTAINER_SECURITY, more["securityContext"])
    return found


def _restricted(container: Object) -> dict[str, Any]:
    """A container of the user's, within the profile."""
    return dict(container) | {"securityContext": _security(_LEAST, container.get("securityContext") or {})}


def _security(base: Object, wanted: Object) -> dict[str, Any]:
    """The profile's settings, with what was chosen within it."""
    more = (wanted.get("capabilities") or {}).get("add")
    capabilities = {"drop": ["ALL"]} | ({"add": list(more)} if more else {})
    return {**base, **wanted, "capabilities": capabilities}
