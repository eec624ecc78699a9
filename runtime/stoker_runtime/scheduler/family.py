"""Sequences with one prompt: which of them holds its pages already, and whether one is about to.

Invariants: a family knows exactly its members that have not ended; it is gone with the last of them.
Knows nothing of pages beyond who holds some, and nothing of policies.
"""

from __future__ import annotations

from stoker_runtime.scheduler.draft import Draft
from stoker_runtime.scheduler.sequence import Sequence

Members = dict[Sequence, None]


class Families:
    """All families of one scheduler."""

    def __init__(self, *, shared: bool = True) -> None:
        """`shared`: whether one sequence's prompt is of any use to another."""
        self._shared = shared
        self._members: dict[tuple[str, bytes], Members] = {}

    def join(self, sequence: Sequence) -> None:
        """A new sequence; alone unless its request names a family whose prompt is the same."""
        name = sequence.request.family
        if not name or not self._shared:
            return
        members = self._members.setdefault((name, sequence.root), {})
        first = next(iter(members), None)
        if first is None or first.request.prompt_token_ids == sequence.request.prompt_token_ids:
            members[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """A sequence ended."""
        key = (sequence.request.family, sequence.root)
        members = self._members.get(key)
        if members is not None and sequence in members:
            del members[sequence]
            if not members:
                del self._members[key]

    def origin(self, sequence: Sequence, covered: int, draft: Draft) -> Sequence | None:
        """Whom `sequence` takes its prompt from, of which `covered` positions are cached: another one; itself if it
        should wait for that; None for the cache.
        """
        wanted = sequence.prompt_length - 1
        if sequence.stored is not None or sequence.scored < wanted or covered >= wanted:
            return None
        source = self.source(sequence, draft)
        return sequence if source is None and self.is_coming(sequence) else source

    def source(self, sequence: Sequence, draft: Draft) -> Sequence | None:
        """A member, not `sequence`, whose prompt was computed by the steps before this one."""
        return next((each for each in self._others(sequence) if _is_ready(each, draft)), None)

    def is_coming(self, sequence: Sequence) -> bool:
        """Whether a member is computing the prompt, so that waiting for it saves the work."""
        return any(each.slot >= 0 for each in self._others(sequence))

    def _others(self, sequence: Sequence) -> Members:
        if not sequence.request.family:
            return {}
        members = self._members.get((sequence.request.family, sequence.root), {})
        return members if sequence in members else {}


def _is_ready(sequence: Sequence, draft: Draft) -> bool:
    if sequence.slot < 0 or sequence.computed < sequence.prompt_length:
        return False
    return not any(each is sequence for each in draft.prefilling)
