"""Rows of a batch-invariant engine: what it costs is measured of one that is, and is compared with no other row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker_kernels.launch import dispatch
from stoker_runtime.bench import engine_flags, engine_mode
from stoker_runtime.bench.rounds import Work
from stoker_runtime.bench.verify import Tolerance
from stoker_runtime.ranks.build import build_executor


@pytest.fixture(autouse=True)
def usual_again() -> Iterator[None]:
    yield
    dispatch.demand_invariance(False)


@pytest.mark.parametrize("flags", [[], ["--batch-invariant"]])
def test_a_row_says_what_it_was_measured_with(flags: list[str]) -> None:
    given = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "3", *flags]
    args = engine_flags.parser().parse_args(given)
    executor = build_executor(engine_flags.engine_config(args))
    assert dispatch.invariance_demanded() == bool(flags)
    row = engine_mode.measure(executor, Work.fixed(3, 7, 5), "", Tolerance(1e-3, 1e-3))
    assert row.verdict.passed
    assert ("batch-invariant" in engine_flags.peer_key(args, executor.config)) == bool(flags)
    executor.close()
