"""Figures of others stand beside ours on their own device alone."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from stoker_runtime.bench.peers import peers_on


def test_they_are_of_one_device() -> None:
    held = json.loads(files("stoker_runtime.bench").joinpath("peers.json").read_text())
    assert peers_on(held["device"]) == held["rows"] != {}


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", "nvidia h200", "NVIDIA", "cpu", ""])
def test_another_device_has_none(device: str) -> None:
    assert peers_on(device) == {}
