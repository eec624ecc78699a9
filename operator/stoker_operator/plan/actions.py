"""The vocabulary of a plan: actions with their reasons, and conditions.

Invariants: frozen; the sentence that explains an action is made where the action is decided and then used
for the event and the log.
Knows nothing of how actions are decided or carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker_operator.plan.drift import difference, restored


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply `manifest`. `create`: nothing of ours has this name yet. `if_refused` is what a person can do
    when the API server does not take it. `patch`: send this JSON merge patch instead, since an apply leaves what others
    added. `quiet`: what comes again and again is logged, and makes no event.
    """

    manifest: Mapping[str, Any]
    reason: str
    create: bool
    if_refused: str = ""
    patch: Mapping[str, Any] | None = None
    quiet: bool = False

    @property
    def event(self) -> tuple[str, str]:
        """(reason, message) of the event that tells of it."""
        verb = "Created" if self.create else "Updated"
        name = self.manifest["metadata"]["name"]
        return verb, f"{verb} {self.manifest['kind']} {name}: {self.reason}."


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object that has this uid; `quiet` as in Apply. `foreground`: it stays until what it owns is gone."""

    kind: str
    name: str
    uid: str
    reason: str
    quiet: bool = False
    foreground: bool = False

    @property
    def event(self) -> tuple[str, str]:
        """(reason, message) of the event that tells of it."""
        return "Deleted", f"Deleted {self.kind} {self.name}: {self.reason}."


@dataclass(frozen=True, slots=True)
class Generate:
    """Make a Secret, unless it is there, with a random value under `key` that whoever writes it makes up, so that no
    plan holds it. It goes with the `owner`, (kind, name).
    """

    manifest: Mapping[str, Any]
    key: str
    owner: tuple[str, str]
    reason: str
    quiet: bool = False

    @property
    def event(self) -> tuple[str, str]:
        """(reason, message) of the event that tells of it."""
        return "Created", f"Created {self.manifest['kind']} {self.manifest['metadata']['name']}: {self.reason}."


Action = Apply | Delete | Generate


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the status. `status`: True, False or Unknown, as Kubernetes spells them."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Why the service is not ready. `stalled`: only a person can change it."""

    reason: str
    message: str
    stalled: bool = False


def ensure(live: Mapping[str, Any] | None, manifest: Mapping[str, Any], why: str) -> list[Apply]:
    """The action that makes `live` hold `manifest`: none if it does, or while it is being deleted."""
    if live is None:
        return [Apply(manifest, why, create=True)]
    if "deletionTimestamp" in live["metadata"]:
        return []
    changed = difference(live, manifest)
    if changed:
        return [Apply(manifest, changed, create=False)]
    added, patch = restored(live, manifest)
    if not added:
        return []
    patch = patch | {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}
    return [Apply(manifest, f"another writer added to {added}; restored", create=False, patch=patch)]
