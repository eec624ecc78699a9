"""States on their way to the host and back, beside their pages: no answer differs, and nothing is left behind."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.executor.hybrid_models import NEMOTRON, QWEN, drafts_of, save_hybrid
from tests.runtime.executor.test_drafts_with_states import ON, build
from tests.runtime.executor.test_speculation import requests, serve

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.arena import state_arena
from stoker_runtime.executor.build import log_host_pool
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.host_memory import LANES, HostStatesPlan, plan_host
from stoker_runtime.executor.page_swap import state_swaps
from stoker_runtime.executor.resolve import GIB, page_bytes, resolve
from stoker_runtime.executor.state import sequence_state_bytes
from stoker_runtime.executor.states.memory import StateCopies
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.step.batch import Batch
from stoker_runtime.terminal.info import describe_host

SEED = random.SystemRandom().randrange(1 << 30)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [NEMOTRON, QWEN])
def test_states_come_back_bit_by_bit(kind: str, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    """Slots' and snapshots' alike, to a host row and to another slot; what is kept or begun in the same step, too."""
    print(f"seed {SEED}")
    spec = build_spec(read_source(save_hybrid(kind, tmp_path, 5)))
    rows, hosted, rng = 7, 4, random.Random(SEED)
    states = state_arena(rows, spec, dtype, torch.device(device))
    assert spec.recurrent is not None
    parts = tuple(each[0, 0].nbytes for each in states)
    copies = StateCopies(states, state_swaps(states, HostStatesPlan(hosted, spec.recurrent.layers, parts)))
    for each in states:
        bits = torch.randint(0, 256, (each.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))
        each.view(torch.uint8).view(-1).copy_(bits)
    expected = [each.view(torch.uint8).clone() for each in states]
    host: dict[int, list[torch.Tensor]] = {}
    for _ in range(60):
        outs = tuple(zip(rng.choices(range(rows), k=2), rng.sample(range(hosted), 2), strict=True))
        saves = tuple((slot, 4 + slot) for slot in rng.sample(range(3), rng.randint(0, 2)))
        loads = ((4 + rng.randrange(3), 3),) * rng.randint(0, 1)
        for row, at in outs:
            host[at] = [each[:, row].clone() for each in expected]
        ins = tuple((at, slot) for at, slot in zip(rng.sample(sorted(host), 2), rng.sample(range(3), 2), strict=True))
        copies.run(Batch(1, (), state_outs=outs, state_saves=saves, state_loads=loads, state_ins=ins))
        for number, each in enumerate(expected):
            for slot, row in (*saves, *loads):
                each[:, row] = each[:, slot].clone()
            for at, slot in ins:
                each[:, slot] = host[at][number]
    for each, bits in zip(states, expected, strict=True):
        assert torch.equal(each.view(torch.uint8), bits)
    copies.close()
    copies.close()


def crowded(kind: str, method: str, device: str, folder: Path, seed: int, **more: Any) -> Executor:
    sizes = {"max_num_seqs": 7, "max_num_batched_tokens": 31, "num_gpu_blocks": 14, "num_cpu_blocks": 30, **more}
    executor = build(str(folder), drafts_of(method, str(folder), seed) if method else None, device, **sizes)
    # So small a model computes its states sooner than they are copied; here they are to move.
    executor.host_page_tokens = executor.host_state_tokens = 0.0
    return executor


@pytest.mark.matrix("kind", take=3)
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("method", ["", "ngram", "draft_model"])
@pytest.mark.parametrize("kind", [NEMOTRON, QWEN])
def test_preemption_by_swap_changes_no_answer(
    kind: str, method: str, caching: bool, device: str, tmp_path: Path
) -> None:
    """Every parameter, in a crowd: sequences leave with their states and go on where they were."""
    seed = 11
    model = save_hybrid(kind, tmp_path, seed)
    plain = build(model, None, "cpu", max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=80)
    asked = requests(random.Random(seed), plain.vocab_size, 24)
    expected, _ = serve(plain, asked, seed, enable_prefix_caching=False)
    given = {"num_state_snapshots": 3} if caching else {"enable_prefix_caching": False}
    swapping = crowded(kind, method, device, tmp_path, seed, **given)
    if device == "cuda":
        swapping.capture()
    got, stats = serve(swapping, asked, seed + 1, scheduling_policy="priority", enable_prefix_caching=caching)
    for request in asked:
        mine, theirs = got[request.id], expected[request.id]
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish), request
        pairs = zip(mine.logprobs, theirs.logprobs, strict=True)
        assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-3) for a, b in pairs), request
    assert stats.preemptions > 0, "the device was meant to be crowded"
    assert min(stats.pages_swapped_out, stats.pages_swapped_in) > 0, "nothing went to the host and back"
    assert (stats.swapped, stats.host_pages_used) == (0, 0)
    assert (stats.accepted_tokens > 0) == bool(method)
    for each in (plain, swapping):
        each.close()


def resolved(folder: Path, device: str = "cuda", **fields: Any) -> tuple[EngineConfig, ModelSpec]:
    spec = build_spec(read_source(str(folder)))
    return resolve(EngineConfig(model="m", **fields), spec, device), spec


def test_states_share_the_memory_with_pages(tmp_path: Path) -> None:
    save_hybrid(NEMOTRON, tmp_path, 3)
    config, spec = resolved(tmp_path, swap_space=1 / 64)
    plan = plan_host(config, spec, lambda: 100 * GIB)
    state, page = sequence_state_bytes(config, spec), page_bytes(config, spec)
    assert plan.states.state_bytes == state
    assert plan.states.count == min(plan.pages, GIB // 128 // state)
    assert GIB / 64 - page < plan.nbytes <= GIB / 64
    assert [each.page_bytes * each.pages for each in plan.states.swaps] == [
        plan.states.count * spec.recurrent.layers * part for part in plan.states.parts
    ] if spec.recurrent else []  # fmt: skip
    lanes = sum(LANES * each.lane_pages * each.page_bytes for each in plan.states.swaps)
    assert plan.device_bytes("cuda") == LANES * plan.lane_pages * page + lanes
    assert plan.states.tokens / plan.page_tokens == pytest.approx(state / page)
    for asked in (1, 9):
        config, spec = resolved(tmp_path, num_cpu_blocks=asked)
        plan = plan_host(config, spec, lambda: 100 * GIB)
        assert (plan.pages, plan.states.count) == (asked, min(asked, max(asked * page // state, 1)))
    assert f"states of {plan.states.count} sequences" in describe_host(plan, 64)


def test_what_does_not_fit_names_the_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_hybrid(QWEN, tmp_path, 3)
    config, spec = resolved(tmp_path, swap_space=1e-5)
    with pytest.raises(ConfigError, match=r"the states of one sequence and a KV page are .* raise --swap-space"):
        plan_host(config, spec, lambda: GIB)
    config, spec = resolved(tmp_path, num_cpu_blocks=5000)
    with pytest.raises(ConfigError, match=r"lower --num-cpu-blocks to (\d+) or less") as caught:
        plan_host(config, spec, lambda: GIB // 10)
    most = int(str(caught.value).split("num-cpu-blocks to ")[1].split()[0])
    config, spec = resolved(tmp_path, num_cpu_blocks=most)
    plan = plan_host(config, spec, lambda: GIB // 10)
    with caplog.at_level("INFO"):
        log_host_pool(plan, config.page_size)
    assert f"({most} pages of {config.page_size} tokens, states of {plan.states.count} sequences)" in caplog.text
