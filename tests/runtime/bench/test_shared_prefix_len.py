"""`stoker bench engine --shared-prefix-len`: prompts that begin alike, which the cache has before a round is timed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from stoker_runtime.bench import engine_flags, engine_mode
from stoker_runtime.bench.rounds import Work, prompts_of
from stoker_runtime.bench.verify import Tolerance
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.prefix import steps
from stoker_runtime.ranks.build import build_executor

FLAGS = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512"]


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """One that shares whatever rows have in common, as no CPU does by itself."""
    monkeypatch.setattr(steps, "prefix_refusal", lambda *_: None)
    monkeypatch.setattr(steps, "prefix_pays", lambda rows, keys, **_: keys > 0)
    args = engine_flags.parser().parse_args([*FLAGS, "--shared-prefix-len", "100"])
    built = build_executor(engine_flags.engine_config(args))
    yield built
    built.close()


def test_all_rounds_begin_alike_and_go_on_differently() -> None:
    seeds = random.sample(range(1000), 2)
    first, second = (prompts_of(Work.fixed(3, 11, 4, 37), 5000, seed) for seed in seeds)
    assert {prompt[:37] for prompt in first + second} == {first[0][:37]}
    assert len({prompt[37:] for prompt in first + second}) == 6
    assert {len(prompt) for prompt in first} == {48}
    assert [prompt[37:] for prompt in first] == prompts_of(Work.fixed(3, 11, 4), 5000, seeds[0])


def test_a_row_says_how_many_steps_shared(executor: Executor, capsys: pytest.CaptureFixture[str]) -> None:
    row = engine_mode.measure(executor, Work.fixed(5, 9, 26, 100), "", Tolerance(1e-3, 1e-3))
    assert row.verdict.passed
    assert row.prefix is not None
    # The first step of all is the prompts'; the rest decode together.
    assert (row.prefix.tokens, row.prefix.shared) == (100, 25)
    assert row.prefix.steps > 25
    engine_mode.print_table([row], header=False)
    assert f"25 of {row.prefix.steps} steps attended the 100 tokens" in capsys.readouterr().out


def test_without_it_nothing_is_shared_or_cached(executor: Executor) -> None:
    row = engine_mode.measure(executor, Work.fixed(3, 40, 8), "", Tolerance(1e-3, 1e-3))
    assert row.prefix is None
    plain = engine_flags.engine_config(engine_flags.parser().parse_args(FLAGS))
    assert not plain.enable_prefix_caching
    assert executor.config.enable_prefix_caching


def test_a_peer_s_figures_are_not_shown_beside_other_work(executor: Executor) -> None:
    args = engine_flags.parser().parse_args([*FLAGS, "--shared-prefix-len", "100"])
    assert engine_flags.peer_key(args, executor.config).endswith("/100+128x256")


def test_what_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        engine_flags.engine_config(engine_flags.parser().parse_args([*FLAGS, "--shared-prefix-len", "-3"]))
    assert engine_mode.main([*FLAGS, "--shared-prefix-len", "64", "--structured"]) == 2
    assert "--shared-prefix-len does not go with --structured" in capsys.readouterr().err
