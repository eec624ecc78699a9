"""What of a sequence whose layers keep a state needs no computing: pages count up to where states are kept, too.

It goes on from what it stored on the host when it was preempted, if all pages before are there, else behind the longest
prefix that has its states kept: on the device, or in the host pool.

Invariants: changes nothing but which of the host's states were looked up last; never says that the last token is there.
Knows nothing of slots, and of which steps move what.
"""

from __future__ import annotations

from stoker_runtime.kvcache.host_pool import HostPool
from stoker_runtime.scheduler.found import Found
from stoker_runtime.scheduler.prefix_states import PrefixStates
from stoker_runtime.scheduler.sequence import Sequence


def find_with_states(
    sequence: Sequence, device: list[int], limit: int, size: int, host: HostPool | None, prefixes: PrefixStates | None
) -> Found:
    """`device`: its first pages that are cached there, of pages of `size` tokens; of the host's `limit` may be used."""
    keys, known = sequence.keys, len(sequence.tokens) - 1
    further = [] if host is None else host.match(keys, limit, len(device))
    back = _stored(sequence, device, further, known, size)
    if back is not None:
        return back
    cached = len(device) + len(further)
    most = min(cached, known // size)
    covered, state = 0 if prefixes is None else prefixes.snapshots.longest(keys, most), None
    if host is not None and host.states is not None:
        for pages in range(most, covered, -1):
            if (state := host.states.row_of(keys[pages - 1])) is not None:
                covered = pages
                break
    near = device[:covered]
    return Found(near, further[: covered - len(near)], covered * size, cached=cached, state=state)


def _stored(sequence: Sequence, device: list[int], further: list[int], known: int, size: int) -> Found | None:
    """What it begins from if all that it stored can be used."""
    stored = sequence.stored
    if stored is None:
        return None
    # What counts of drafts that were in flight is known by now: all tokens but the last one were run.
    positions = min(stored.positions + stored.ahead, known)
    device = device[: positions // size]
    further = further[: max(0, stored.first - len(device))]
    at = len(device) + len(further)
    if at < stored.first:
        return None
    own = stored.pages[at - stored.first : -(-positions // size) - stored.first]
    return Found(device, [*further, *own], positions, cached=at, state=stored.state)
