"""Key-values of GGUF files: what is there is read, what is broken is named."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from stoker_runtime.errors import ModelError
from stoker_runtime.gguf_metadata import read_metadata


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(*entries: bytes, magic: bytes = b"GGUF", version: int = 3, count: int | None = None) -> bytes:
    head = magic + struct.pack("<IQQ", version, 0, len(entries) if count is None else count)
    return head + b"".join(entries)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_every_type(path: Path) -> None:
    path.write_bytes(
        gguf(
            entry("u8", 0, b"\x07"),
            entry("i32", 5, struct.pack("<i", -3)),
            entry("f32", 6, struct.pack("<f", 0.5)),
            entry("yes", 7, b"\x01"),
            entry("s", 8, text("héllo")),
            entry("u64", 10, struct.pack("<Q", 2**40)),
            entry("list", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
            entry("scores", 9, struct.pack("<IQ", 6, 3) + struct.pack("<3f", 1, 2, 3)),
            entry("flags", 9, struct.pack("<IQ", 7, 2) + b"\x01\x00"),
        )
    )
    found = read_metadata(path)
    assert list(found["scores"]) == [1.0, 2.0, 3.0]
    assert list(found["flags"]) == [1, 0]
    assert {key: value for key, value in found.items() if key not in ("scores", "flags")} == {
        "u8": 7,
        "i32": -3,
        "f32": 0.5,
        "yes": True,
        "s": "héllo",
        "u64": 2**40,
        "list": ["a", ""],
    }


def test_only_what_is_wanted(path: Path) -> None:
    path.write_bytes(gguf(entry("a.x", 0, b"\x01"), entry("b.x", 0, b"\x02")))
    assert read_metadata(path, lambda key: key.startswith("b.")) == {"b.x": 2}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "too short"),
        (gguf(magic=b"GGML"), "it starts with b'GGML'"),
        (gguf(version=1), "version 1 is not supported"),
        (gguf(count=1), "truncated or corrupt"),
        (gguf(entry("k", 8, struct.pack("<Q", 10**9))), "only 0 are left"),
        (gguf(entry("k", 77, b"")), "unknown type 77"),
        (gguf(entry("k", 9, struct.pack("<IQ", 8, 10**12))), "an array of 1000000000000 strings"),
        (gguf(entry("k", 9, struct.pack("<IQ", 8, 2) + text("abcdefgh"))), "length is missing"),
        (gguf(entry("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 99))), "runs past the end"),
        (gguf(entry("k", 9, struct.pack("<IQ", 6, 10**12))), "an array of 1000000000000 numbers"),
        (gguf(entry("k", 9, struct.pack("<IQ", 9, 1))), "an array of unknown type 9"),
        (gguf(struct.pack("<Q", 2**50) + b"x" * 20), "a key of"),
    ],
)
def test_broken_files_are_named(path: Path, raw: bytes, says: str) -> None:
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=says) as caught:
        read_metadata(path)
    assert str(path) in caught.value.message


def test_every_truncation_is_an_error(path: Path) -> None:
    whole = gguf(entry("s", 8, text("abc")), entry("list", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("c")))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_metadata(path)


def test_missing_file(path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_metadata(path)
