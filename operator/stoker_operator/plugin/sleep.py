"""`kubectl stoker wake` and `sleep`: an annotation that the operator carries out once, and the steps until it has.

Invariants: asks by the annotation alone, so that it takes no other right than to change the service; a service that
would not do as it is asked is refused before anything is written. Every step is told once.
Knows nothing of how a service sleeps.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from stoker_operator.manifests.activation import ASLEEP, AWAKE
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.place import ready_of
from stoker_operator.spec.service import WISH

Object = Mapping[str, Any]
EVERY_SECONDS = 1.0
_DURATION = re.compile(r"[0-9]{1,6}[smh]")


def wish(words: str, lasts: str = "") -> str:
    """What the annotation is to say, unlike any before. Raises PluginError for a duration that is none."""
    if lasts and not _DURATION.fullmatch(lasts):
        raise PluginError(f"--for {lasts!r} is not a duration such as 45m or 8h.")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{words}{f' for {lasts}' if lasts else ''} at {now}/{secrets.token_hex(2)}"


def check(service: Object) -> None:
    """Raises PluginError for a service that neither sleeps nor wakes."""
    name, spec = service["metadata"]["name"], service["spec"]
    if spec.get("suspend"):
        raise PluginError(f"spec.suspend of {name} is true: set it to false.")
    if "scaleToZero" not in (spec.get("autoscaling") or {}):
        raise PluginError(
            f"{name} runs its pods all the time: spec.autoscaling says no scaleToZero. spec.suspend: true ends them."
        )
    said = _sleeps(service)
    if said.get("status") == "False":
        raise PluginError(f"{name} cannot sleep: {said['message']}")


def steps(read: Callable[[], Object], asked: str, wakes: bool, timeout: float) -> Iterator[str]:
    """Each step, as it comes, until the service is where it was asked to be.

    Raises PluginError where it is not within `timeout` seconds, or where the operator cannot read the wish.
    """
    end, last = time.monotonic() + timeout, ""
    while True:
        service = read()
        sleep = (service.get("status") or {}).get("sleep") or {}
        said = _sleeps(service)
        if said.get("reason") == "WishUnknown":
            raise PluginError(str(said["message"]))
        if service["metadata"].get("annotations", {}).get(WISH) != asked:
            raise PluginError("somebody else asked for something else meanwhile.")
        line = _line(service, sleep, asked)
        # The seconds that are left change with every look.
        step = re.sub(r"[0-9]+ s to go", "", line)
        if step != last:
            yield line
            last = step
        done = sleep.get("state") == (AWAKE if wakes else ASLEEP)
        if sleep.get("wish") == asked and done and (not wakes or ready_of(service)["status"] == "True"):
            return
        if time.monotonic() > end:
            raise PluginError(f"that is not so after {timeout:g} s; the wish stands, and --timeout waits for longer.")
        time.sleep(EVERY_SECONDS)


def _line(service: Object, sleep: Object, asked: str) -> str:
    """Where it stands, in a line."""
    state = sleep.get("state", "")
    if "step" in sleep:
        left = f", about {sleep['etaSeconds']} s to go" if sleep.get("etaSeconds") else ""
        return f"Waking: {sleep['step']}{left}"
    if state == AWAKE and sleep.get("wish") == asked and sleep.get("until"):
        return f"Awake until {sleep['until']} at least, then until nobody asks"
    if state == AWAKE:
        return f"Awake: {_sleeps(service).get('message', '')}"
    if state == ASLEEP and sleep.get("wakesAt"):
        return f"Asleep: a request wakes it, and its schedule at {sleep['wakesAt']}"
    return {ASLEEP: "Asleep: a request wakes it"}.get(state, state or "the operator has not looked at it yet")


def _sleeps(service: Object) -> Mapping[str, Any]:
    conditions = (service.get("status") or {}).get("conditions") or ()
    return next((item for item in conditions if item["type"] == "ScaleToZero"), {})
