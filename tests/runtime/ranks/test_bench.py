"""`stoker bench ranks`: real processes read what is timed, and a step that comes as another is no figure."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stoker_runtime.errors import EngineError
from stoker_runtime.ranks import bench
from stoker_runtime.ranks.wire import Wire
from stoker_runtime.step.batch import Batch


def test_each_kind_of_step_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = random.randrange(2, 90)
    assert bench.main(["--readers", "2", "--rows", str(rows), "--steps", "30"]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    found = [line.split() for line in lines]
    assert [line[:3] for line in found] == [["3", str(rows), kind] for kind in bench.KINDS]
    for *_, encode, median, p99 in found:
        assert 0 < float(encode) < float(median) <= float(p99)


def test_steps_that_come_as_others_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Wire.encode

    def damaged(wire: Wire, batch: Batch) -> bytes:
        return encode(wire, replace(batch, step=batch.step + (batch.step == 4)))

    monkeypatch.setattr(Wire, "encode", damaged)
    with pytest.raises(EngineError, match="other steps than were written"):
        bench.measure(1, "same", 3, 8)
