"""Loading what was uploaded ahead: the same weights as from the files, whatever part of them came."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.runtime.weights.host_driver import HostDriver, host_bytes_at

from stoker_runtime.checkpoint.safetensors_index import checkpoint_files
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.weights import copy_lanes, upload_ahead, uploaded
from stoker_runtime.weights.load import load_weights
from stoker_runtime.weights.upload_ahead import UploadAhead

CPU = torch.device("cpu")
Checkpoint = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploaded, "bytes_at", host_bytes_at)
    monkeypatch.setattr(upload_ahead, "CHUNK_BYTES", 10_000)


def _ahead(path: Path, driver: HostDriver) -> UploadAhead:
    ahead = UploadAhead(checkpoint_files(path), lambda free, total, files: free)
    ahead.run(lambda: driver)
    return ahead


def _load(path: Path, dtype: torch.dtype, quantization: str, ahead: UploadAhead | None) -> DecoderWeights:
    source = read_source(str(path))
    return load_weights(source, build_spec(source), CPU, dtype, quantization, ahead=ahead)


def _assert_equal(ours: DecoderWeights, theirs: DecoderWeights) -> None:
    assert torch.equal(ours.embed, theirs.embed)
    assert torch.equal(ours.head.data, theirs.head.data)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(layer.input_norm, expected.input_norm)
        for name in ("qkv", "output", "gate_up", "down"):
            weight, reference = getattr(layer, name), getattr(expected, name)
            assert torch.equal(weight.data.view(torch.uint8), reference.data.view(torch.uint8))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-sharded", "llama-tied", "qwen2"])
def test_the_weights_are_those_of_the_files(
    name: str, dtype: torch.dtype, quantization: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(name)
    expected = _load(path, dtype, quantization, None)
    driver = HostDriver()
    ahead = _ahead(path, driver)
    assert ahead.failure == ""
    monkeypatch.setattr(copy_lanes, "Lane", lambda device: pytest.fail("nothing is read from the files"))
    _assert_equal(_load(path, dtype, quantization, ahead), expected)
    assert driver.blocks == {}


def test_what_did_not_come_is_read(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("llama-sharded")
    expected = _load(path, torch.bfloat16, "none", None)
    driver = HostDriver()
    ahead = _ahead(path, driver)
    given: list[int] = []

    def ten(address: int, count: int) -> torch.Tensor:
        given.append(count)
        if len(given) == 10:
            ahead._fail("the device fell off the bus")
        return host_bytes_at(address, count)

    monkeypatch.setattr(uploaded, "bytes_at", ten)
    with caplog.at_level(logging.INFO):
        _assert_equal(_load(path, torch.bfloat16, "none", ahead), expected)
    assert len(given) == 10
    assert driver.blocks == {}
    assert "weights: read from the files: the device fell off the bus" in caplog.text


def test_a_header_of_odd_length_is_loaded(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("llama")
    expected = _load(path, torch.float32, "none", None)
    content = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    _assert_equal(_load(tmp_path, torch.float32, "none", _ahead(tmp_path, HostDriver())), expected)


def test_a_broken_file_is_reported_as_without_it(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("llama")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1000])
    messages = []
    for ahead in (None, _ahead(tmp_path, HostDriver())):
        with pytest.raises(ModelError) as caught:
            _load(tmp_path, torch.float32, "none", ahead)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_gpu_gets_the_weights_of_the_files(
    quantization: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker_runtime.weights.cuda_driver import CudaDriver

    monkeypatch.undo()
    monkeypatch.setattr(upload_ahead, "CHUNK_BYTES", 10_000)
    path = tiny_checkpoint("llama-sharded")
    source = read_source(str(path))
    spec, gpu = build_spec(source), torch.device("cuda")
    expected = load_weights(source, spec, gpu, torch.bfloat16, quantization)
    ahead = UploadAhead(checkpoint_files(path), lambda free, total, files: free)
    ahead.run(CudaDriver)
    assert ahead.failure == ""
    monkeypatch.setattr(copy_lanes, "Lane", lambda device: pytest.fail("nothing is read from the files"))
    _assert_equal(load_weights(source, spec, gpu, torch.bfloat16, quantization, ahead=ahead), expected)
    assert ahead.reserved == 0
