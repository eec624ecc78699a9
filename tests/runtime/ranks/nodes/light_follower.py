"""A rank without a model: it writes down what it is told, and ends when it is told to. Everything else is a rank's."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from stoker_runtime.ranks.follower import main
from stoker_runtime.ranks.ring import Ring
from stoker_runtime.ranks.team import RankStart
from stoker_runtime.ranks.wire import STOP, command

FOLDER = "TEST_TOLD_FOLDER"
LENGTH = struct.Struct("<I")


def follow(start: RankStart) -> None:
    ring = Ring(os.open(start.ring, os.O_RDWR), start.readers)
    with open(Path(os.environ[FOLDER]) / str(start.place.rank), "ab", buffering=0) as told:
        while (message := ring.read(start.reader)) != command(STOP):
            told.write(LENGTH.pack(len(message)) + message)
    ring.close()


def told_to(rank: int) -> list[bytes]:
    """What a rank has been told so far."""
    file = Path(os.environ[FOLDER]) / str(rank)
    data = file.read_bytes() if file.exists() else b""  # it may not have started yet
    found, at = [], 0
    while at < len(data):
        (length,) = LENGTH.unpack_from(data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


if __name__ == "__main__":
    sys.exit(main(follow))
