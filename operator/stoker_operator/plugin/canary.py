"""`kubectl stoker promote` and `abort`: what is asked of the operator by an annotation, and how a canary moves into the
spec.

Invariants: a wish names the trial that it is for, so it says nothing of a later one; it is no part of the spec, so no
tool that holds the spec takes it back. The patch of a spec is refused by the API server when somebody else changed the
service meanwhile.
Knows nothing of how the operator judges a canary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_operator.manifests.canary import ABORTED, FAILED, IN_SPEC, PASSED, PROMOTED, PROMOTING, RUNNING, STARTING
from stoker_operator.plugin.errors import PluginError
from stoker_operator.spec.canary import merged
from stoker_operator.spec.service import CANARY_WISH

Object = Mapping[str, Any]
_OPEN = {"promote": (STARTING, RUNNING, PASSED), "abort": (STARTING, RUNNING, PASSED, PROMOTING, PROMOTED)}
_DONE = {"promote": "promoted", "abort": "taken back"}
_WHY_NOT = {
    FAILED: "it was taken back, as the condition Canary says; change spec.canary",
    ABORTED: "it was taken back; take spec.canary out and put it in again to try the same again",
    PROMOTED: "it is promoted already; --spec moves it into the spec",
    PROMOTING: "it is on its way to all pods already",
    IN_SPEC: "the spec says the same already; --spec takes spec.canary out",
}


def wish(service: Object, verb: str) -> list[dict[str, Any]]:
    """The JSON patch that asks for it. Raises PluginError where the canary stands otherwise."""
    known = _known(service)
    state = str(known.get("state", ""))
    if not state:
        raise PluginError("the operator has not looked at its canary yet.")
    if state not in _OPEN[verb]:
        raise PluginError(f"its canary cannot be {_DONE[verb]}: {_WHY_NOT.get(state, f'it is {state}')}.")
    note = {CANARY_WISH: f"{verb} {known['name']}"}
    notes = service["metadata"].get("annotations")
    path = "/metadata/annotations"
    if notes is None:
        return [_unchanged(service), {"op": "add", "path": path, "value": note}]
    key = CANARY_WISH.replace("~", "~0").replace("/", "~1")
    return [_unchanged(service), {"op": "add", "path": f"{path}/{key}", "value": note[CANARY_WISH]}]


def into_spec(service: Object) -> list[dict[str, Any]]:
    """The JSON patch that makes the spec say what the canary is. Raises PluginError for one that was not promoted."""
    state = str(_known(service).get("state", ""))
    if state not in (PROMOTED, PROMOTING, IN_SPEC):
        text = f"its canary is {state or 'not looked at yet'}, and moving it into the spec would skip what protects"
        raise PluginError(f"{text} the service; promote it first.")
    parts = merged(service["spec"]).items()
    moved = [{"op": "add", "path": f"/spec/{part}", "value": value} for part, value in parts]
    return [_unchanged(service), *moved, {"op": "remove", "path": "/spec/canary"}]


def _known(service: Object) -> Object:
    if not service["spec"].get("canary"):
        raise PluginError("it has no canary: spec.canary is not set.")
    found: Object = (service.get("status") or {}).get("canary") or {}
    return found


def _unchanged(service: Object) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/resourceVersion", "value": service["metadata"]["resourceVersion"]}
