"""The benchmark of models with states: right rows pass, an engine that loses a state does not; and a shape's first
layers.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker_runtime.bench import engine_flags, engine_mode
from stoker_runtime.bench.rounds import Work
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.layers import state
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.ranks.build import build_executor

SEED = random.SystemRandom().randrange(1 << 30)
# Of rows as narrow as here, what the deviation of random weights is of published ones.
WIDE = 0.15


def shapes(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Tiny ones of odd sizes, of the published kinds of layers."""
    groups, heads = rng.choice([2, 3]), rng.choice([3, 5])
    return {
        "nemotron-h-8b": {
            "hybrid_override_pattern": "M-M*-M", "num_hidden_layers": 6, "hidden_size": 36 * rng.choice([2, 3]),
            "num_attention_heads": 6, "num_key_value_heads": 2, "attention_head_dim": 20, "intermediate_size": 90,
            "mamba_num_heads": 2 * groups, "mamba_head_dim": 12, "ssm_state_size": 18, "n_groups": groups,
        },
        "qwen3-next-80b-a3b": {
            "num_hidden_layers": 9, "hidden_size": 68, "head_dim": 24, "num_attention_heads": heads,
            "num_key_value_heads": 1, "linear_num_key_heads": groups, "linear_num_value_heads": 2 * groups,
            "linear_key_head_dim": 14, "linear_value_head_dim": 10, "num_experts": 11, "num_experts_per_tok": 3,
            "moe_intermediate_size": 26, "shared_expert_intermediate_size": 30,
        },
    }  # fmt: skip


@pytest.fixture(params=["nemotron-h-8b", "qwen3-next-80b-a3b"])
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    print(f"seed {SEED}")
    sizes = shapes(random.Random(SEED))[request.param]
    common = {"vocab_size": 260, "max_position_embeddings": 512, "eos_token_id": 257, "dtype": "float32"}
    monkeypatch.setitem(SHAPES, "odd", SHAPES[request.param] | common | sizes)
    monkeypatch.setattr("stoker_runtime.weights.random.STD", WIDE)
    return ["--shape", "odd", "--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "5"]


def verdict(flags: list[str]) -> Any:
    args = engine_flags.parser().parse_args(flags)
    executor = build_executor(engine_flags.engine_config(args))
    try:
        key, tolerance = engine_flags.peer_key(args, executor.config), engine_mode.tolerance_of(args, executor.config)
        return engine_mode.measure(executor, Work.fixed(4, 45, 14), key, tolerance)
    finally:
        executor.close()


def test_right_rows_pass_and_lost_states_do_not(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = verdict(flags)
    assert right.verdict.passed, right.verdict
    for name in ("mamba2_scan", "gated_delta_rule"):
        scan = getattr(state, name)

        def forgets(*args: Any, scan: Any = scan) -> Tensor:
            *_, held, _ = args
            held.zero_()
            return scan(*args)  # type: ignore[no-any-return]

        monkeypatch.setattr(state, name, forgets)
    assert not verdict(flags).verdict.passed


def test_windows_of_convolutions_count(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    conv = state.causal_conv

    def forgets(x: Tensor, window: Tensor, *args: Any) -> Tensor:
        window.zero_()
        return conv(x, window, *args)

    monkeypatch.setattr(state, "causal_conv", forgets)
    assert not verdict(flags).verdict.passed


def test_a_shape_is_cut_to_its_first_layers(flags: list[str]) -> None:
    least, most = 4, SHAPES["odd"]["num_hidden_layers"]
    row = verdict([*flags, "--num-hidden-layers", str(least)])
    assert row.verdict.passed
    assert row.key.startswith(f"odd@{least}/")
    for count in (-1, least - 1, most + 1):
        args = engine_flags.parser().parse_args([*flags, "--num-hidden-layers", str(count)])
        with pytest.raises(ConfigError, match=f"is {count}; the first {least} to {most} layers"):
            engine_flags.engine_config(args)


def test_a_checkpoint_is_not_cut() -> None:
    args = engine_flags.parser().parse_args(["somewhere/model", "--num-hidden-layers", "2"])
    with pytest.raises(ConfigError, match="of a --shape"):
        engine_flags.engine_config(args)


@pytest.mark.parametrize("shape", ["nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_random_states_last_for_tokens_and_for_thousands(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = shapes(random.Random(SEED))[shape]
    monkeypatch.setitem(SHAPES, "odd", SHAPES[shape] | {"vocab_size": 260, "eos_token_id": 257} | sizes)
    args = engine_flags.parser().parse_args(["--shape", "odd", "--device", "cpu", "--max-model-len", "64"])
    executor = build_executor(engine_flags.engine_config(args))
    layers = [each.state for each in executor.decoder.weights.layers if each.state is not None]
    executor.close()
    steps = torch.nn.functional.softplus(torch.cat([each.dt_bias for each in layers]))
    rates = torch.cat([each.a_log for each in layers]).exp()
    assert 9e-4 < float(steps.min()) <= float(steps.max()) < 0.11
    assert 1.0 <= float(rates.min()) <= float(rates.max()) <= 16.0
    assert all(each.skip is None or bool((each.skip == 1.0).all()) for each in layers)
    assert float(torch.cat([each.conv.flatten() for each in layers]).float().std()) == pytest.approx(0.5, rel=0.2)
