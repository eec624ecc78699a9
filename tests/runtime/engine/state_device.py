"""What a device has of layers with a state: of each slot one, of prefixes those that were kept, and the host's copies.

A state is how many tokens it stands for, and the fingerprint of all of them: a step has to go on exactly where its
slot's state stands. What was drafted and not accepted leaves no trace in it.
"""

from __future__ import annotations

from stoker_runtime.step.batch import Batch

State = tuple[int, int]


class StateDevice:
    """Rows of states: those of `slots`, then those of `snapshots`. A row that nothing was kept in is None."""

    def __init__(self, slots: int, snapshots: int, host_rows: int) -> None:
        self._rows: list[State | None] = [None] * (slots + snapshots)
        self._host: list[State | None] = [None] * host_rows
        self._slots = slots
        self.computed = 0
        """Tokens that were run."""
        self.skipped = 0
        """Tokens that were not run, for a state of theirs was there."""
        self.out = self.back = 0
        """States that went to the host, and that came back."""

    def copy(self, batch: Batch) -> None:
        saves, loads = batch.state_saves, batch.state_loads
        rows = range(self._slots, len(self._rows))
        assert len({row for _, row in saves}) == len(saves), "a snapshot is written twice"
        assert all(0 <= slot < self._slots and row in rows for slot, row in saves), "a save from or to nowhere"
        assert all(0 <= slot < self._slots and row in rows for row, slot in loads), "a load from or to nowhere"
        targets = [slot for _, slot in (*loads, *batch.state_ins)]
        assert len(set(targets)) == len(targets), "a slot begins twice"
        assert set(targets) <= {each.slot for each in batch.assigns}, "a state for who did not ask"
        assert len({host for _, host in batch.state_outs}) == len(batch.state_outs), "the host's row is written twice"
        for row, host in batch.state_outs:
            assert self._rows[row] is not None, f"row {row} has no state to store"
            self._host[host] = self._rows[row]
            self.out += 1
        for slot, row in saves:
            assert self._rows[slot] is not None, f"slot {slot} has no state to keep"
            self._rows[row] = self._rows[slot]
        for row, slot in loads:
            kept = self._rows[row]
            assert kept is not None, f"nothing was kept in row {row}"
            self._rows[slot] = kept
            self.skipped += kept[0]
        for host, slot in batch.state_ins:
            kept = self._host[host]
            assert kept is not None, f"nothing was stored in row {host} of the host"
            self._rows[slot] = kept
            self.skipped += kept[0]
            self.back += 1

    def run(self, slot: int, start: int, before: int, stop: int, after: int) -> None:
        """Tokens `[start, stop)`, with the fingerprints before and behind them."""
        if start:
            assert self._rows[slot] == (start, before), f"slot {slot} goes on at {start} from {self._rows[slot]}"
        self._rows[slot] = (stop, after)
        self.computed += stop - start
