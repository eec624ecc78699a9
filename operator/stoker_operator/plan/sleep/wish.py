"""What people ask of a service by its annotation `stoker.dev/wish`: `wake`, `wake for 1h`, `sleep`.

Invariants: pure. A wish is carried out once: what was carried out is noted word for word, so the same words are nothing
new; ` at …` with whatever follows makes them other ones. How long it is to be awake counts from when the operator saw
the wish, so that no clocks are compared.
Knows nothing of how a service sleeps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker_operator.manifests.activation import Sleep
from stoker_operator.spec.quantity import seconds
from stoker_operator.spec.service import WISH, InferenceService

_WORDS = re.compile(r"(?:(wake)(?: for ([0-9]{1,6}[smh]))?|sleep)(?: at \S{1,64})?")
LONGEST_SECONDS = 604800


@dataclass(frozen=True, slots=True)
class Wish:
    """A wish that was not carried out yet. `seconds`: to be awake for so long, None = as after a request."""

    text: str
    wakes: bool
    seconds: int | None = None


def new_wish(service: InferenceService, before: Sleep) -> Wish | None:
    """What is asked for and not carried out yet; None, nothing, or nothing that can be read."""
    text = service.wish
    found = _WORDS.fullmatch(text)
    if found is None or text == before.wish:
        return None
    lasts = seconds(found[2]) if found[2] else None
    return None if lasts is not None and lasts > LONGEST_SECONDS else Wish(text, bool(found[1]), lasts)


def wish_problem(service: InferenceService) -> str:
    """Why the annotation says nothing; "" where it does, or is not there."""
    found = _WORDS.fullmatch(service.wish)
    if not service.wish or (found is not None and (not found[2] or seconds(found[2]) <= LONGEST_SECONDS)):
        return ""
    return f"The annotation {WISH} says {service.wish[:80]!r}; it may say wake, wake for 1h (168h at most), or sleep"
