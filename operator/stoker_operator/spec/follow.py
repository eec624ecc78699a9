"""`spec.model.updatePolicy: Follow`, and what came of it: the commit that stands in for the revision that a spec names.

Invariants: pure; what a status remembers counts for the source that it was written for and for no other; nothing here
holds a secret.
Knows nothing of how a commit is looked up and rolled out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOVING = ("hf", "oci", "s3", "gs", "az")
"""The sources whose revision may become another one: a branch, a tag, the state of a prefix."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Followed:
    """What is known of a followed revision; times as Kubernetes writes them, "" = none.

    `commit` is what is served in place of the first one, `since` when it was published here; `found` is a newer one
    that is being fetched; `seen` what a look-up found of a source whose state may be half written; `checked` when one
    last found anything.
    """

    commit: str = ""
    since: str = ""
    found: str = ""
    seen: str = ""
    seen_at: str = ""
    checked: str = ""


def follow_source(uri: str, revision: str, endpoint: str) -> str:
    """Names what is followed."""
    return hashlib.sha256(json.dumps([uri, revision, endpoint]).encode()).hexdigest()[:10]


def read_followed(status: Mapping[str, Any], source: str) -> Followed:
    """What a status remembers of `source`."""
    raw = status.get("follow") or {}
    if not isinstance(raw, Mapping) or raw.get("source") != source:
        return Followed()
    names = {"commit": "commit", "since": "since", "found": "found", "seen": "seen", "seen_at": "seenTime"}
    return Followed(**{name: str(raw.get(key, "")) for name, key in names.items()}, checked=str(raw.get("checked", "")))


def follow_problems(policy: str, uri: str, revision: str, existing_claim: str) -> list[str]:
    """The CRD's CEL rules of updatePolicy, in the same words."""
    if policy != "Follow":
        return []
    field, found = "spec.model.updatePolicy", []
    if uri.partition("://")[0] not in MOVING:
        found.append(f"{field}: only hf://, oci:// and object stores have a revision to follow")
    if _COMMIT.fullmatch(revision) or "@sha256:" in uri:
        found.append(f"{field}: a commit never becomes another one; follow a branch or a tag")
    if existing_claim:
        found.append(f"{field}: each commit would stay on a claim of yours (cache.pvc.existingClaim) for good")
    return found
