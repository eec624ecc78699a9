"""The ring between processes: every message reaches every reader, whole and in order, and nothing stays behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_runtime.ranks.ring import BYTES_PER_SLOT, SLOTS, Ring

READER = """
import sys, zlib
from stoker_runtime.ranks.ring import Ring
ring = Ring(int(sys.argv[1]), 2)
while True:
    message = ring.read(int(sys.argv[2]))
    print(len(message), zlib.crc32(message), flush=True)
    if not message:
        break
"""


def nothing() -> None:
    """A writer that waits for readers has nobody to give up on here."""


def test_messages_of_any_size_reach_all_readers_in_order() -> None:
    import zlib

    ring = Ring.create(2)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(ring.descriptor), str(reader)],
            pass_fds=(ring.descriptor,),
            stdout=subprocess.PIPE,
            text=True,
        )
        for reader in range(2)
    ]
    sizes = [1, BYTES_PER_SLOT, BYTES_PER_SLOT + 1, *(random.randrange(1, 3000) for _ in range(300))]
    sizes += [BYTES_PER_SLOT * (SLOTS + 3) + 5]
    messages = [random.randbytes(size) for size in sizes] + [b""]
    for message in messages:
        ring.write(message, nothing)
    expected = [f"{len(message)} {zlib.crc32(message)}" for message in messages]
    for reader in readers:
        out, _ = reader.communicate(timeout=120)
        assert out.splitlines() == expected
    ring.close()


def test_a_writer_waits_for_the_slowest_reader_and_may_give_up() -> None:
    ring = Ring.create(2)
    turns = 0

    def stalled() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            raise TimeoutError

    for _ in range(SLOTS):
        ring.write(b"x", stalled)
        assert ring.read(0) == b"x"
    assert turns == 0
    with pytest.raises(TimeoutError):
        ring.write(b"y", stalled)
    assert [ring.read(1) for _ in range(SLOTS)] == [b"x"] * SLOTS
    ring.write(b"y", stalled)
    assert (ring.read(0), ring.read(1)) == (b"y", b"y")
    ring.close()


def test_it_has_no_name_and_its_memory_goes_with_it() -> None:
    before = set(os.listdir("/dev/shm"))
    ring = Ring.create(1)
    descriptor = ring.descriptor
    assert "memfd:stoker-ring" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
    ring.close()
    ring.close()
    assert not Path(f"/proc/self/fd/{descriptor}").exists()
    assert set(os.listdir("/dev/shm")) <= before | {name for name in os.listdir("/dev/shm") if "stoker" not in name}
