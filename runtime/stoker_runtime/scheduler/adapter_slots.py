"""Which adapter has which slot on the device: given to the sequences that are admitted, kept after them, least recently
used given up first.

Invariants: a slot holds one adapter; an adapter that a placed sequence uses keeps its slot; one whose sequences are all
gone stays where it is until the slot is wanted. Number 0 is no adapter and needs none.
Knows nothing of names and files, and of where the bytes come from.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

NO_ADAPTER = -1
"""The slot of a sequence without one."""


class AdapterSlots:
    """The slots of one device; with none of them there are no adapters."""

    def __init__(self, slots: int) -> None:
        self.num_slots = slots
        self._slot_of: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Adapters with a slot and no sequence, least recently used first."""
        self._free = list(range(slots - 1, -1, -1))
        self._loads: list[tuple[int, int]] = []
        self._waiting: Counter[int] = Counter()

    def has_room(self, adapter: int) -> bool:
        """Whether a sequence with this adapter may be placed now."""
        return not adapter or adapter in self._slot_of or bool(self._free or self._idle)

    def acquire(self, adapter: int) -> int:
        """A sequence with this adapter is placed: its slot. The caller has asked `has_room`."""
        if not adapter:
            return NO_ADAPTER
        if adapter not in self._slot_of:
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                self._free.append(self._slot_of.pop(oldest))
            self._slot_of[adapter] = self._free.pop()
            self._loads.append((adapter, self._slot_of[adapter]))
        self._idle.pop(adapter, None)
        self._users[adapter] += 1
        return self._slot_of[adapter]

    def release(self, adapter: int) -> None:
        """A placed sequence leaves."""
        if adapter:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
                self._idle[adapter] = None

    def take_loads(self) -> tuple[tuple[int, int], ...]:
        """What the batch to be launched brings to the device: (adapter, slot)."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def defers(self, adapter: int, closed: set[int]) -> bool:
        """Whether a sequence with this adapter has to wait for a slot, when asked in the order of the queue.

        For each that does, the adapter with the fewest sequences is `closed` to those behind it: who joins it would
        keep its slot from getting free.
        """
        if self.has_room(adapter):
            return adapter in closed
        left = {each: users for each, users in self._users.items() if each not in closed}
        if left:
            closed.add(min(left, key=lambda each: (left[each], each)))
        return True

    def forget(self) -> None:
        """No slot's content can be trusted any more. Nothing is placed."""
        self._free += [self._slot_of[adapter] for adapter in self._idle]
        for adapter in self._idle:
            del self._slot_of[adapter]
        self._idle.clear()
        self._loads.clear()

    def queue(self, adapter: int, count: int) -> None:
        """So many sequences more, or fewer, wait with this adapter."""
        if adapter:
            self._waiting[adapter] += count
            if not self._waiting[adapter]:
                del self._waiting[adapter]

    @property
    def running(self) -> tuple[int, ...]:
        """Adapters of placed sequences."""
        return tuple(self._users)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Adapters of sequences that wait."""
        return tuple(self._waiting)

    def check(self, placed: Iterable[tuple[int, int]], waiting: Iterable[int]) -> None:
        """Raise AssertionError unless the books are those of the `placed` (adapter, slot) and adapters `waiting`."""
        placed = list(placed)
        for adapter, slot in placed:
            assert slot == (self._slot_of[adapter] if adapter else NO_ADAPTER), (
                f"adapter {adapter} is not in slot {slot}"
            )
        assert self._users == Counter(adapter for adapter, _ in placed if adapter), "users of adapters are miscounted"
        assert self._waiting == Counter(adapter for adapter in waiting if adapter), "adapters waited for are miscounted"
        held = sorted([*self._slot_of.values(), *self._free])
        assert held == list(range(self.num_slots)), "adapter slots are lost or shared"
        assert set(self._idle) == set(self._slot_of) - set(self._users), "idle adapters differ"
