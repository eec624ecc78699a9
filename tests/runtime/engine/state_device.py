"""What a device has of layers with a state: of each slot one, and of prefixes those that were kept.

A state is how many tokens it stands for, and the fingerprint of all of them: a step has to go on exactly where its
slot's state stands. What was drafted and not accepted leaves no trace in it.
"""

from __future__ import annotations

from stoker_runtime.step.batch import Batch

State = tuple[int, int]


class StateDevice:
    """Rows of states: those of `slots`, then those of `snapshots`. A row that nothing was kept in is None."""

    def __init__(self, slots: int, snapshots: int) -> None:
        self._rows: list[State | None] = [None] * (slots + snapshots)
        self._slots = slots
        self.computed = 0
        """Tokens that were run."""
        self.skipped = 0
        """Tokens that were not run, for a state of theirs was there."""

    def copy(self, batch: Batch) -> None:
        saves, loads = batch.state_saves, batch.state_loads
        rows = range(self._slots, len(self._rows))
        assert len({row for _, row in saves}) == len(saves), "a snapshot is written twice"
        assert len({slot for _, slot in loads}) == len(loads), "a slot begins twice"
        assert all(0 <= slot < self._slots and row in rows for slot, row in saves), "a save from or to nowhere"
        assert all(0 <= slot < self._slots and row in rows for row, slot in loads), "a load from or to nowhere"
        assert {slot for _, slot in loads} <= {each.slot for each in batch.assigns}, "a state for who did not ask"
        for slot, row in saves:
            assert self._rows[slot] is not None, f"slot {slot} has no state to keep"
            self._rows[row] = self._rows[slot]
        for row, slot in loads:
            kept = self._rows[row]
            assert kept is not None, f"nothing was kept in row {row}"
            self._rows[slot] = kept
            self.skipped += kept[0]

    def run(self, slot: int, start: int, before: int, stop: int, after: int) -> None:
        """Tokens `[start, stop)`, with the fingerprints before and behind them."""
        if start:
            assert self._rows[slot] == (start, before), f"slot {slot} goes on at {start} from {self._rows[slot]}"
        self._rows[slot] = (stop, after)
        self.computed += stop - start
