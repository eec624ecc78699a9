"""Published sizes of every architecture on a GPU: random weights, graphs, and the tokens of the plain reference.

Of each architecture one published configuration is drawn, cut to the first layers that have every kind of its layers.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.executor.published_configs import PUBLISHED

from stoker_runtime.bench import engine_mode
from stoker_runtime.executor.cuda_graphs import StepGraphs
from stoker_runtime.executor.graphs.step_shape import StepShape
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

SEED = int(os.environ.get("SEED", random.randrange(2**32)))
MOST_SEEN = 4096
"""The longest window that prompts reach beyond."""
ARCHITECTURES = sorted({config["architectures"][0] for config in PUBLISHED.values()})


def drawn(architecture: str) -> tuple[str, dict[str, Any]]:
    """A published model of the architecture, and its config.json with as many layers as show all kinds."""
    names = [name for name, config in PUBLISHED.items() if config["architectures"][0] == architecture]
    name = random.Random(f"{SEED} {architecture}").choice(names)
    config = PUBLISHED[name]
    text = config.get("text_config", {})
    layers = 1 + max(1, config.get("first_k_dense_replace", 0), text.get("first_k_dense_replace", 0))
    count = {"num_hidden_layers": layers}
    return name, {**config, **count, **({"text_config": {**text, **count}} if text else {})}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[StepShape, bool]]:
    """How many steps of each shape were replayed as graphs, and how many not."""
    counts: Counter[tuple[StepShape, bool]] = Counter()
    run = StepGraphs.run

    def counted(graphs: StepGraphs, shape: StepShape) -> torch.Tensor:
        output = run(graphs, shape)
        counts[shape, not graphs.missing([shape])] += 1
        return output

    monkeypatch.setattr(StepGraphs, "run", counted)
    return counts


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_in_graphs_are_the_reference_s(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: Counter[tuple[StepShape, bool]]
) -> None:
    name, config = drawn(architecture)
    (tmp_path / "config.json").write_text(json.dumps(config))
    draw = random.Random(f"{SEED} {name}")
    windows = build_spec(read_source(f"shape:{tmp_path}")).windows
    beyond = max(window if window <= MOST_SEEN else 0 for window in windows)
    flags = ["--input-len", str(beyond + draw.randint(40, 90)), "--output-len", str(draw.randint(24, 48))]
    some = f"1,{draw.randint(2, 8 if beyond else 40)}"
    room = ["--max-model-len", "4352" if beyond else "256", "--gpu-memory-utilization", "0.4"]
    file = tmp_path / "rows.json"
    status = engine_mode.main(["--shape", str(tmp_path), "--n", some, *flags, *room, "--json", str(file)])
    told = capsys.readouterr()
    gc.collect()
    torch.cuda.empty_cache()
    assert status == 0, f"seed {SEED}, {name}, {some}, {flags}: {told.out[-3000:]}{told.err[-3000:]}"
    report = json.loads(file.read_text())
    assert int(report["engine"]["graphs"]) > 0
    # A shape that was not prepared runs once by itself; from then on it is a graph.
    assert all(count == 1 for (_, replayed), count in steps.items() if not replayed), steps
    assert sum(count for (_, replayed), count in steps.items() if replayed) >= int(flags[3])
    assert [row["verdict"]["positions"] > 0 for row in report["rows"]] == [True, True]
