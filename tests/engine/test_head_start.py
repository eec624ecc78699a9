"""What is begun before torch is imported never decides and never fails."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine import head_start
from stoker_runtime.process_clock import process_age


def test_only_weights_are_read_ahead(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.gguf", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in head_start.weight_files(str(tmp_path))] == ["a.gguf", "b.safetensors"]
    assert head_start.weight_files(str(tmp_path / "a.gguf")) == [tmp_path / "a.gguf"]
    assert head_start.weight_files("shape:tiny") == []
    head_start.read_ahead([tmp_path / "a.gguf", tmp_path / "gone.gguf"])


@pytest.mark.parametrize(("device", "context"), [("cpu", False), ("auto", True), ("cuda", True)])
def test_a_context_is_made_for_gpus_alone(device: str, context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    monkeypatch.setattr(head_start, "create_context", lambda: made.append(True))
    for thread in head_start.begin(EngineConfig(model="shape:tiny", device=device)):
        thread.join()
    assert made == [True] * context


def test_the_context_is_the_first_devices_primary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name) or 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    head_start.create_context()
    assert calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    head_start.create_context()


def test_a_process_knows_its_age() -> None:
    age = process_age()
    assert 0 < age < 24 * 3600
    assert process_age() >= age
