"""Headers of safetensors files: what is found, and how a broken or cut file is reported."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker_runtime.checkpoint.safetensors_index import checkpoint_files, read_checkpoint_index, read_header
from stoker_runtime.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return tmp_path


def _raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_entries_point_at_the_bytes(folder: Path) -> None:
    entries = read_checkpoint_index(folder)
    assert set(entries) == {"a", "b"}
    entry = entries["a"]
    assert (entry.shape, entry.encoding, entry.num_bytes) == ((2, 3), "F32", 24)
    data = entry.file.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
    assert struct.unpack("<6f", data) == (0, 1, 2, 3, 4, 5)


def test_the_index_decides_which_files_count(folder: Path) -> None:
    save_file({"c": torch.ones(1)}, folder / "consolidated.safetensors")
    assert [file.name for file in checkpoint_files(folder)] == ["model.safetensors"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"c": "consolidated.safetensors"}}))
    assert set(read_checkpoint_index(folder)) == {"c"}


def test_without_index_and_single_file_all_files_count(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    save_file({"c": torch.ones(1)}, folder / "part-2.safetensors")
    assert set(read_checkpoint_index(folder)) == {"a", "b", "c"}


@pytest.mark.parametrize("cut", [0, 5, 20])
def test_a_cut_header_is_reported_with_sizes(folder: Path, cut: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelError, match=rf"model\.safetensors: the header ends at byte \d+.* {cut} bytes"):
        read_checkpoint_index(folder)


def test_cut_data_is_reported_with_tensor_and_sizes(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    message = rf"tensor \w ends at byte {len(whole)}, but the file has {len(whole) - 3} bytes; it is truncated"
    with pytest.raises(ModelError, match=message):
        read_checkpoint_index(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "not an object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "broken header entry"),
        ({"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}, "dtype F3"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes; its header gives 4"),
    ],
)
def test_a_broken_header_is_reported(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_header(_raw(tmp_path / "x.safetensors", header, bytes(8)))


def test_no_json_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 4) + b"\xff\xfe{}")
    with pytest.raises(ModelError, match="header cannot be read"):
        read_header(file)


def test_a_tensor_in_two_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    save_file({"a": torch.ones(1)}, folder / "2.safetensors")
    with pytest.raises(ModelError, match=r"tensor a is also in 1\.safetensors"):
        read_checkpoint_index(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "cannot be read as an index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file name within the folder"),
        ('{"weight_map": {"a": "z.safetensors"}}', "1 of 1 files are missing: z.safetensors"),
    ],
)
def test_a_bad_index(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        read_checkpoint_index(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        read_checkpoint_index(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"holds pytorch_model\.bin"):
        read_checkpoint_index(tmp_path)
