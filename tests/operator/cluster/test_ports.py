"""ports.py: no two services share a port, and a service keeps its own."""

from __future__ import annotations

import pytest

from stoker_operator.cluster.ports import Ports, PortsTaken

ONE, TWO, THREE = ("a", "one"), ("a", "two"), ("b", "one")


def test_a_service_keeps_its_port_and_gets_nobody_elses() -> None:
    ports = Ports(range(7000, 7003))
    assert ports.of(ONE, {}) == 7000
    assert ports.of(TWO, {}) == 7001, "what was given a moment ago is not in the cluster yet"
    assert ports.of(ONE, {}) == 7000
    assert ports.of(ONE, {ONE: 7000, TWO: 7001}) == 7000
    assert Ports(range(7000, 7003)).of(THREE, {ONE: 7000, TWO: 7001}) == 7002, "after a restart"


def test_who_is_gone_leaves_a_free_port() -> None:
    ports = Ports(range(7000, 7001))
    assert ports.of(ONE, {}) == 7000
    with pytest.raises(PortsTaken, match="all 1 ports"):
        ports.of(TWO, {})
    ports.forget(ONE)
    assert ports.of(TWO, {}) == 7000


def test_of_two_with_the_same_port_one_gets_another() -> None:
    assert Ports(range(7000, 7009)).of(TWO, {ONE: 7003, TWO: 7003}) == 7000
