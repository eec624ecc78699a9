"""Uploading ahead: the bytes of the files, as many as there is room for, or none and the reason."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.weights.host_driver import HostDriver

from stoker_runtime.weights import upload_ahead
from stoker_runtime.weights.cuda_driver import CudaDriver, DriverError
from stoker_runtime.weights.upload_ahead import PAGE_BYTES, UploadAhead

CHUNK = 1000


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_ahead, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b", "empty", "c")]
    for path, size in zip(paths, (12_345, 999, 0, 4 * CHUNK), strict=True):
        path.write_bytes(os.urandom(size))
    return paths


def upload(files: list[Path], driver: HostDriver, room: int = 1 << 30) -> UploadAhead:
    ahead = UploadAhead(files, lambda free, total, files: room)
    ahead.run(lambda: driver)
    return ahead


def bytes_of(ahead: UploadAhead, file: Path, offset: int, count: int) -> bytes:
    address = ahead.address(file, offset, count)
    assert address is not None
    return ctypes.string_at(address, count)


def test_the_block_has_the_files_bytes(files: list[Path]) -> None:
    driver = HostDriver()
    ahead = upload(files, driver)
    assert ahead.reserved == PAGE_BYTES
    assert driver.buffers == 0
    for file in files:
        content = file.read_bytes()
        for offset, count in [(0, len(content)), (8, 100), (CHUNK - 1, 2), (CHUNK, CHUNK), (len(content) - 1, 1)]:
            if count and 0 <= offset <= len(content) - count:
                assert bytes_of(ahead, file, offset, count) == content[offset : offset + count]
    assert ahead.address(files[2], 0, 0) is None
    assert ahead.address(files[0].parent / "other", 0, 1) is None
    assert ahead.describe().startswith("0.00 GiB uploaded ahead")
    ahead.close()
    ahead.close()
    assert driver.blocks == {}
    assert ahead.reserved == 0
    assert ahead.address(files[0], 0, 1) is None


def test_a_taker_waits_for_its_bytes_alone(files: list[Path]) -> None:
    driver = HostDriver()
    driver.gate.clear()
    ahead = UploadAhead(files, lambda free, total, files: 1 << 30)
    thread = threading.Thread(target=ahead.run, args=(lambda: driver,))
    thread.start()
    assert ahead.reserved == PAGE_BYTES
    taken: list[bytes] = []
    taker = threading.Thread(target=lambda: taken.append(bytes_of(ahead, files[0], 2 * CHUNK, CHUNK)))
    taker.start()
    taker.join(0.05)
    assert taker.is_alive()
    driver.gate.set()
    taker.join()
    thread.join()
    assert taken == [files[0].read_bytes()[2 * CHUNK : 3 * CHUNK]]
    assert ahead.waited_seconds >= 0.04
    ahead.close()


def test_closing_ends_an_upload_under_way(files: list[Path]) -> None:
    driver = HostDriver()
    driver.gate.clear()
    ahead = UploadAhead(files, lambda free, total, files: 1 << 30)
    thread = threading.Thread(target=ahead.run, args=(lambda: driver,))
    thread.start()
    assert ahead.reserved
    threading.Timer(0.05, driver.gate.set).start()
    ahead.close()
    thread.join(1)
    assert not thread.is_alive()
    assert driver.blocks == {}
    assert driver.buffers == 0


@pytest.mark.parametrize("call", ["enter", "allocate", "pinned", "copy"])
def test_what_the_driver_refuses_is_left_to_the_files(call: str, files: list[Path]) -> None:
    driver = HostDriver(fails=call)
    ahead = upload(files, driver)
    assert ahead.address(files[0], 0, 1) is None
    assert ahead.describe() == f"read from the files: {call} is refused"
    driver.fails = ""
    ahead.close()
    assert driver.blocks == {}


def test_a_driver_that_is_missing(files: list[Path]) -> None:
    def missing() -> HostDriver:
        raise DriverError("no CUDA driver")

    ahead = UploadAhead(files, lambda free, total, files: 1 << 30)
    ahead.run(missing)
    assert (ahead.reserved, ahead.failure) == (0, "no CUDA driver")


@pytest.mark.parametrize("room", [PAGE_BYTES - 1, -1])
def test_memory_that_is_too_small(room: int, files: list[Path]) -> None:
    driver = HostDriver()
    ahead = upload(files, driver, room)
    assert (ahead.reserved, driver.blocks) == (0, {})
    assert "are allowed, of" in ahead.failure
    assert upload(files, driver, PAGE_BYTES).failure == ""


@pytest.mark.parametrize("seed", range(8))
def test_what_has_no_room_is_left_to_the_files(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of each file begins the block; a range is given whole or not at all."""
    draw = random.Random(seed)
    monkeypatch.setattr(upload_ahead, "PAGE_BYTES", 512)
    files = [tmp_path / str(i) for i in range(draw.randint(1, 4))]
    for file in files:
        file.write_bytes(draw.randbytes(draw.choice([1, CHUNK, draw.randint(1, 9 * CHUNK)])))
    total = sum(file.stat().st_size for file in files)
    room = draw.randint(CHUNK + 512, total + 4096)
    asked: list[int] = []
    ahead = UploadAhead(files, lambda free, whole, all_files: asked.append(all_files) or room)
    ahead.run(HostDriver)
    assert (asked, ahead.failure) == ([total], "")
    assert ahead.reserved <= room
    given = 0
    for file in files:
        content = file.read_bytes()
        there = next((n for n in range(len(content), 0, -1) if ahead.address(file, 0, n) is not None), 0)
        given += there
        assert not there or bytes_of(ahead, file, 0, there) == content[:there]
        assert there == len(content) or ahead.address(file, there, 1) is None
        assert there == len(content) or ahead.address(file, max(0, there - 2), 4) is None
    assert given > 0
    assert given == total or given > room - CHUNK - 512 * len(files) - upload_ahead.ALIGNMENT * len(files)
    assert ("without room" in ahead.describe()) == (given < total)
    ahead.close()


def test_no_files_and_a_missing_one(files: list[Path], tmp_path: Path) -> None:
    assert upload([], HostDriver()).failure == "there are no safetensors"
    assert "No such file" in upload([*files, tmp_path / "gone"], HostDriver()).failure


def test_short_reads_are_continued(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:77]], at))
    ahead = upload(files, HostDriver())
    assert bytes_of(ahead, files[0], 0, 12_345) == files[0].read_bytes()


def test_a_file_that_shrinks_while_it_is_uploaded(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, views, at) if at < 5000 else 0)
    ahead = upload(files, HostDriver())
    assert "a file ended at byte" in ahead.failure
    assert ahead.address(files[0], 0, 1) is None


@pytest.mark.parametrize("change", ["longer", "replaced", "gone"])
def test_a_file_that_changed_is_read_again(change: str, files: list[Path]) -> None:
    ahead = upload(files, HostDriver())
    if change == "longer":
        with files[0].open("ab") as stream:
            stream.write(b"x")
    else:
        files[0].rename(files[0].with_suffix(".old"))
    if change == "replaced":
        files[0].write_bytes(files[0].with_suffix(".old").read_bytes())
    assert ahead.address(files[1], 0, 1) is not None
    assert ahead.address(files[0], 0, 1) is None
    assert ahead.describe() == "read from the files: a has changed since it was uploaded"
    assert ahead.address(files[1], 0, 1) is None
    ahead.close()


def test_a_reader_that_dies_leaves_no_one_waiting(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(upload_ahead, "fill", lambda chunk, buffer: 1 / 0)
    ahead = upload(files, HostDriver())
    assert ahead.address(files[0], 0, 1) is None
    assert ahead.failure == "the upload ended early"


class Library:
    """Records the driver's calls; `status` is what each answers."""

    def __init__(self, status: dict[str, int]) -> None:
        self.calls: list[str] = []
        self.status = status

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self.status.get(name, 0)

        return call


def test_the_context_is_the_first_devices_primary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library({})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    CudaDriver().enter()
    assert library.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]


def test_a_refused_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library({"cuMemAlloc_v2": 2}))
    driver = CudaDriver()
    with pytest.raises(DriverError, match="cuMemAlloc_v2: CUDA error 2"):
        driver.allocate(1)


def test_no_driver_is_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match="no CUDA driver: libcuda"):
        CudaDriver()
