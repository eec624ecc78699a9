"""Random adapters of a benchmark: each request is checked with its own, and no other one passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker_runtime.bench import engine_flags, engine_mode
from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.bench.rounds import Work
from stoker_runtime.bench.verify import Tolerance
from stoker_runtime.ranks.build import build_executor


def test_a_row_is_checked_with_the_adapter_of_each_request(tmp_path: Path, monkeypatch: Any) -> None:
    rank, count = random.choice([3, 7, 11]), random.choice([2, 3, 5])
    print(f"rank {rank}, {count} adapters")
    flags = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--adapters", str(count)]
    args = engine_flags.parser().parse_args([*flags, "--max-lora-rank", str(rank), "--max-num-seqs", "4"])
    executor = build_executor(engine_flags.engine_config(args))
    folders = write_adapters(executor.decoder.spec, count, rank, tmp_path)
    work, tolerance = Work.fixed(4, 9, 8), Tolerance(1e-3, 1e-3)
    assert "-lora-" in engine_flags.peer_key(args, executor.config)

    def measured(change: Callable[[Any], Any]) -> bool:
        checked = engine_mode.verify_greedy
        with monkeypatch.context() as patch:
            patch.setattr(engine_mode, "verify_greedy", lambda *given: checked(*given[:-1], change(given[-1])))
            row = engine_mode.measure(executor, work, "", tolerance, adapters=folders)
        return row.verdict.passed and row.verdict.positions == 24

    assert measured(lambda given: given)
    assert not measured(lambda given: [*given[1:], given[0]])
    assert not measured(lambda given: [])


def test_adapters_are_no_part_of_a_row_without_them(tmp_path: Path) -> None:
    flags = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32"]
    args = engine_flags.parser().parse_args(flags)
    config = engine_flags.engine_config(args)
    assert not config.enable_lora
    assert "lora" not in engine_flags.peer_key(args, config)
    idle = engine_flags.parser().parse_args([*flags, "--enable-lora"])
    executor = build_executor(engine_flags.engine_config(idle))
    row = engine_mode.measure(executor, Work.fixed(2, 5, 6), "", Tolerance(1e-3, 1e-3))
    assert executor.config.enable_lora
    assert row.verdict.passed
