"""Split GGUF models: SmolLM2's own file, split by gguf's library at odd places, is the same model."""

from __future__ import annotations

import random
import re
from pathlib import Path

import gguf
import pytest
import torch
from tests import real_models

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.engine.head_start import weight_files
from stoker_runtime.errors import ModelError
from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")


def split(whole: Path, folder: Path, tensors: int, *, small_first: bool = False) -> list[Path]:
    """Write `whole` again in parts of at most `tensors` tensors, by gguf's own writer."""
    reader = gguf.GGUFReader(whole)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(
        folder / "smol.gguf", architecture, split_max_tensors=tensors, small_first_shard=small_first
    )
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("smol-*.gguf"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    size = random.Random(real_models.smollm2().stat().st_size).randrange(29, 90)
    return split(real_models.smollm2(), tmp_path_factory.mktemp("split"), size)


def test_the_parts_are_the_whole(parts: list[Path]) -> None:
    assert len(parts) > 2
    assert [path.name for path in parts] == list(part_names(parts[1].name))
    whole = read_gguf_header(real_models.smollm2())
    found = read_gguf_header(parts[0])
    assert {name: value for name, value in found.metadata.items() if not name.startswith("split.")} == whole.metadata
    assert {name: entry.shape for name, entry in found.tensors.items()} == {
        name: entry.shape for name, entry in whole.tensors.items()
    }
    assert {entry.file for entry in found.tensors.values()} == set(parts)
    assert shape_of(parts[0]) == shape_of(real_models.smollm2()) != {}
    assert weight_files(str(parts[0])) == parts


def test_weights_and_tokenizer_of_any_part_are_those_of_the_whole(parts: list[Path]) -> None:
    source, whole = read_source(str(parts[-1])), read_source(str(real_models.smollm2()))
    assert source.config == whole.config
    spec = build_spec(whole)
    ours = load_weights(source, spec, CPU, torch.float32)
    theirs = load_weights(whole, spec, CPU, torch.float32)
    assert torch.equal(ours.embed, theirs.embed)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.qkv.data, other.qkv.data)
        assert torch.equal(mine.down.data, other.down.data)
    text = "Splitting héros into 3 parts."
    assert Tokenizer.load(str(parts[-1])).encode(text) == Tokenizer.load(str(real_models.smollm2())).encode(text)


def test_a_first_part_without_tensors_is_read(tmp_path: Path) -> None:
    parts = split(real_models.smollm2(), tmp_path, 101, small_first=True)
    assert read_source(str(parts[0])).config == read_source(str(real_models.smollm2())).config


def test_a_missing_part_is_named(parts: list[Path], tmp_path: Path) -> None:
    for path in (parts[0], *parts[2:]):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ModelError, match=rf"{re.escape(parts[1].name)}: this part of a split model of {len(parts)} "):
        read_source(str(tmp_path / parts[0].name))


def test_a_part_under_another_name_or_in_anothers_place_is_refused(parts: list[Path], tmp_path: Path) -> None:
    renamed = tmp_path / "model.gguf"
    renamed.symlink_to(parts[0])
    with pytest.raises(ModelError, match="its name does not say which"):
        read_source(str(renamed))
    for path in parts:
        (tmp_path / path.name).symlink_to(parts[0])
    with pytest.raises(ModelError, match=r"part 0 \(from 0\)"):
        read_source(str(tmp_path / parts[0].name))


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-1-of-2.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-99999.gguf"]
)
def test_other_names_are_no_parts(name: str) -> None:
    assert part_names(name) == ()
