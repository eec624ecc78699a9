"""Which files of a repository are taken."""

from __future__ import annotations

import pytest

from stoker_runtime.fetch.errors import BadRequest, ModelNotFound
from stoker_runtime.fetch.select import select

SAFETENSORS = ["model-1.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json", "merges.txt"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([*SAFETENSORS, "README.md", "pytorch_model.bin", "model.onnx"], SAFETENSORS),
        ([*SAFETENSORS, "consolidated.safetensors", "onnx/model.json"], SAFETENSORS),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
        ([*SAFETENSORS, "m.gguf"], SAFETENSORS),
        (["m.gguf", "README.md", "config.json"], ["m.gguf"]),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        (["tokenizer.model", "1_Pooling/config.json"], ["tokenizer.model", "1_Pooling/config.json"]),
    ],
)
def test_default_choice(names: list[str], chosen: list[str]) -> None:
    assert select(names, where="hf://o/r") == sorted(chosen)


def test_globs_replace_and_narrow_the_default() -> None:
    assert select([*SAFETENSORS, "x.bin"], allow=["*.bin"], where="") == ["x.bin"]
    assert select(SAFETENSORS, ignore=["*.txt", "tok*"], where="") == [
        "config.json",
        "model-1.safetensors",
        "model.safetensors.index.json",
    ]


def test_several_ggufs_are_a_choice_for_a_person() -> None:
    with pytest.raises(BadRequest, match=r"name one as hf://o/r/FILE, or .* hf://o/r:Q4_K_M: a\.gguf, b\.gguf"):
        select(["b.gguf", "a.gguf"], where="hf://o/r")


def test_one_file_by_name_brings_its_other_parts() -> None:
    parts = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert select([*parts, "x.gguf"], file=parts[0], where="") == parts
    assert select([*parts, "x.gguf"], file="x.gguf", where="") == ["x.gguf"]
    with pytest.raises(ModelNotFound, match=r"lacks its part 'm-00002-of-00003\.gguf'"):
        select([parts[0], parts[2]], file=parts[0], where="")


def test_a_missing_gguf_names_the_ones_there_are() -> None:
    with pytest.raises(ModelNotFound, match=r"It has: a\.gguf"):
        select(["a.gguf", "config.json"], file="b.gguf", where="hf://o/r")
