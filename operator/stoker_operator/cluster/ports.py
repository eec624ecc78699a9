"""Which port of the activator is whose, of those that services may have.

Invariants: no two services have the same port, whichever was made when: what the cluster holds wins, and what was given
away a moment ago is remembered until it is seen there. A service keeps its port.
Knows nothing of what a port is for.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker_operator.cluster.queue import Key


class PortsTaken(Exception):
    """Every port is a service's."""


class Ports:
    """Gives ports of `span` away, the lowest free one first."""

    def __init__(self, span: range) -> None:
        self._span = span
        self._given: dict[Key, int] = {}

    def of(self, key: Key, known: Mapping[Key, int]) -> int:
        """The port of `key`; `known` are those that the cluster holds. Raises PortsTaken."""
        self._given = {other: port for other, port in self._given.items() if known.get(other) != port}
        mine = known.get(key, 0) or self._given.get(key, 0)
        others = {port for other, port in (*known.items(), *self._given.items()) if other != key}
        if mine in self._span and mine not in others:
            return mine
        free = next((port for port in self._span if port not in others), 0)
        if not free:
            raise PortsTaken(f"all {len(self._span)} ports of the activator are taken")
        self._given[key] = free
        return free

    def forget(self, key: Key) -> None:
        """The service of `key` is gone."""
        self._given.pop(key, None)
