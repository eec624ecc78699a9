"""What is begun before torch is imported never decides and never fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine import core, head_start
from stoker_runtime.errors import ConfigError
from stoker_runtime.process.clock import process_age
from stoker_runtime.weights.cuda_driver import DriverError
from stoker_runtime.weights.upload_ahead import UploadAhead

GIB = 1024**3


def test_only_weights_are_read_ahead(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.gguf", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in head_start.weight_files(str(tmp_path))] == ["a.gguf", "b.safetensors"]
    assert head_start.weight_files(str(tmp_path / "a.gguf")) == [tmp_path / "a.gguf"]
    assert head_start.weight_files("shape:tiny") == []
    head_start.read_ahead([tmp_path / "a.gguf", tmp_path / "gone.gguf"])


def test_only_safetensors_of_the_checkpoint_are_uploaded(tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors", "a.gguf"):
        (tmp_path / name).write_bytes(b"x")
    assert head_start.uploadable(str(tmp_path)) == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert head_start.uploadable(str(tmp_path)) == []
    assert head_start.uploadable(str(tmp_path / "a.gguf")) == []
    assert head_start.uploadable("shape:tiny") == []


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_context_is_made_without_files_too(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def driver() -> None:
        made.append(True)
        raise DriverError("none here")

    monkeypatch.setattr(head_start, "CudaDriver", driver)
    ahead = head_start.begin(EngineConfig(model="shape:tiny", device=device))
    assert ahead is not None
    assert ahead.reserved == 0
    ahead.close()
    assert made == [True]
    assert ahead.failure == "none here"


def test_nothing_is_uploaded_to_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden: Callable[[], None] = lambda: pytest.fail("no driver is asked for")  # noqa: E731
    monkeypatch.setattr(head_start, "CudaDriver", forbidden)
    assert head_start.begin(EngineConfig(model="shape:tiny", device="cpu")) is None


@pytest.mark.parametrize(
    ("fields", "free", "files", "expected"),
    [
        ({"gpu_memory_utilization": 1.0}, 100, 45, 45),
        ({"gpu_memory_utilization": 1.0}, 100, 61, 29),
        ({"gpu_memory_utilization": 0.5}, 100, 15, 30),
        ({"gpu_memory_utilization": 0.5}, 40, 2, -11),
        ({"gpu_memory_utilization": 1.0, "gpu_memory_reserve_gb": 20.0}, 100, 40, 32),
        ({"gpu_memory_utilization": 1.0, "dtype": "float32"}, 100, 30, 30),
        ({"gpu_memory_utilization": 1.0, "dtype": "float32"}, 100, 50, -10),
    ],
)
def test_files_leave_room_for_the_weights(
    fields: dict[str, float], free: int, files: int, expected: float
) -> None:  # fmt: skip
    config = EngineConfig(model="shape:tiny", **fields)  # type: ignore[arg-type]
    assert head_start.upload_room(config, free * GIB, 100 * GIB, files * GIB) == pytest.approx(expected * GIB)


def test_a_failed_start_gives_back_what_was_brought() -> None:
    class Silent:
        def poll(self, milliseconds: int) -> int:
            return 0

    def build(config: EngineConfig, ahead: UploadAhead | None) -> NoReturn:
        assert ahead is not None
        raise ConfigError("it does not fit")

    ahead = UploadAhead([], lambda free, total, files: 0)
    closed: list[bool] = []
    ahead.close = lambda: closed.append(True)  # type: ignore[method-assign]
    socket: Any = Silent()
    assert core.build_and_serve(EngineConfig(model="shape:tiny"), build, socket, ahead) == 2
    assert closed == [True]


def test_a_process_knows_its_age() -> None:
    age = process_age()
    assert 0 < age < 24 * 3600
    assert process_age() >= age
