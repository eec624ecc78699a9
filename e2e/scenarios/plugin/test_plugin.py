"""Scenario: `kubectl stoker` against real pods: the screen, a question and a benchmark through a port-forward, logs,
and the way back to the revision before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.person import Plugin, plugin_of

KEY = "sk-scenario-4711"


@pytest.fixture
def plugin(place: Kube, tmp_path: Path) -> Plugin:
    return plugin_of(place, tmp_path, secret=KEY)


def test_a_person_looks_asks_and_goes_back(place: Kube, plugin: Plugin) -> None:
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"keys": f"{KEY}\n"}}
    place.apply(keys)
    talk = stoker.service("talk", endpoint={"auth": {"apiKeysSecretRef": {"name": "keys"}}})
    place.apply(talk)
    eventually("the screen tells of the way", lambda: "not ready: " in plugin("status", "talk"), 60)
    stoker.wait_ready(place, "talk")
    shown = plugin("status", "talk")
    assert f"{place.namespace}/talk  Ready" in shown
    assert "[+] ready" in shown

    asked = ("chat", "talk", "Name the capital of France.", "--", "--temperature", "0", "--max-tokens", "20")
    assert "Paris" in plugin(*asked)
    measured = plugin("bench", "talk", "--", "--n", "1", "--rounds", "1", "--input-len", "8", "--output-len", "4",
                      "--no-warm-up", "--vocab", "1000")  # fmt: skip
    assert "tok/s" in measured
    logs = plugin("logs", "talk", "--tail", "200")
    assert "POST /v1/chat/completions" in logs
    assert "/health" not in logs

    place.merge("infsvc", "talk", {"spec": {"runtime": {"contextLength": 384}}})
    stoker.wait_ready(place, "talk")
    listed = plugin("rollback", "talk", "--list").splitlines()
    assert len(listed) == 3
    assert "(runs)" in listed[2]
    plugin("rollback", "talk")
    assert place.get("infsvc", "talk")["spec"]["runtime"]["contextLength"] == 512
    stoker.wait_ready(place, "talk")
    assert "Paris" in plugin(*asked)
