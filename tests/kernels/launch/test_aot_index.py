"""The choice among precompiled variants, without any kernel."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from stoker_kernels.launch import aot_index
from stoker_kernels.launch.aot_index import Cubin, Index, Wanted, read_index, split_type, write_index

ALIGNED = Cubin(
    file="aligned.cubin",
    kernel="m.copy",
    source="1",
    entry="copy",
    threads=128,
    shared=0,
    launch_pdl=True,
    arguments={"x": "*bf16", "bias": "*bf16", "stride": "i32:16"},
    constants={"BLOCK": 64},
    options={"num_warps": 4},
)
GENERIC = replace(ALIGNED, file="generic.cubin", arguments={"x": "*bf16:1", "bias": "*bf16:1", "stride": "i32"})
WITHOUT = replace(
    ALIGNED, file="without.cubin", arguments={"x": "*bf16", "stride": "i32:16"}, constants={"BLOCK": 64, "bias": None}
)
WANTED = Wanted(
    "m.copy",
    "1",
    {"x": ("*bf16", True), "bias": ("*bf16", True), "stride": ("i32", True)},
    {"BLOCK": 64},
    {"num_warps": 4},
)


def _index() -> Index:
    return Index(Path("aot"), [GENERIC, ALIGNED, WITHOUT])


def _with(**kinds: tuple[str, bool]) -> Wanted:
    return replace(WANTED, arguments={**WANTED.arguments, **kinds})


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        (WANTED, "aligned.cubin"),
        (_with(stride=("i32", False)), "generic.cubin"),
        (_with(x=("*bf16", False)), "generic.cubin"),
        (_with(bias=("none", False)), "without.cubin"),
        (_with(bias=("none", False), stride=("i32", False)), None),
        (_with(x=("*fp16", True)), None),
        (_with(stride=("i64", True)), None),
        (replace(WANTED, constants={"BLOCK": 128}), None),
        (replace(WANTED, options={"num_warps": 8}), None),
        (replace(WANTED, options={}), None),
        (replace(WANTED, source="2"), None),
        (replace(WANTED, kernel="m.move"), None),
    ],
)
def test_the_most_assuming_variant_that_fits_is_taken(wanted: Wanted, file: str | None) -> None:
    found = _index().find(wanted)
    assert (found and found.file) == file


def test_the_reason_says_what_is_missing() -> None:
    index = _index()
    assert "sources have changed" in index.reason(replace(WANTED, source="2"))
    assert index.reason(replace(WANTED, kernel="m.move")) == "none is in aot"
    assert "stride: i64:16" in index.reason(_with(stride=("i64", True)))
    assert "BLOCK=128" in index.reason(replace(WANTED, constants={"BLOCK": 128}))


@pytest.mark.parametrize(
    ("text", "parts"), [("*bf16", ("*bf16", 16)), ("*i32:1", ("*i32", 1)), ("i32", ("i32", 1)), ("i32:16", ("i32", 16))]
)
def test_pointers_are_aligned_unless_they_say(text: str, parts: tuple[str, int]) -> None:
    assert split_type(text) == parts


def test_an_index_is_read_from_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_AOT_DIR", str(tmp_path))
    (tmp_path / "sm_90").mkdir()
    write_index(tmp_path / "sm_90", [ALIGNED, GENERIC])
    read_index.cache_clear()
    assert read_index(90).find(WANTED) == ALIGNED
    assert read_index(80).find(WANTED) is None
    read_index.cache_clear()


def test_a_compiled_kernel_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(aot_index, "_compiled", {})
    with caplog.at_level(logging.INFO):
        for reason in ("no variant", "another"):
            aot_index.note_compiled("m.copy", reason)
    assert [record.getMessage() for record in caplog.records] == ["kernels: m.copy is compiled here (no variant)"]
    assert aot_index.compiled_at_start() == {"m.copy": "no variant"}
