"""States of sequences over ranks: slots that change hands, preemption, choices of one prompt, sleep; and stages of
which one has no layer with a state, or none that attends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.executor.test_real_executor import workload
from tests.runtime.models.test_hybrid import choices
from tests.runtime.models.test_zoo import SEED, save_random
from tests.runtime.ranks.test_kinds import DELTA_SHARED, MAMBA_SHARED
from tests.runtime.ranks.test_tokens import alone

from stoker_runtime import LLM
from stoker_runtime.executor.host_memory import OPERATIONS_PER_SECOND
from stoker_runtime.models.layer_specs.state_spec import Mixer
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling_params import SamplingParams as OfflineParams

Ranks = Callable[..., LLM]
MODELS = {"mamba": ("NemotronHForCausalLM", MAMBA_SHARED), "delta": ("Qwen3NextForCausalLM", DELTA_SHARED)}
CROWDED: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 5, "max_num_batched_tokens": 24, "num_gpu_blocks": 9,
    "enable_sleep_mode": True,
}  # fmt: skip


def save(name: str, folder: Path, **changes: Any) -> str:
    print(f"seed {SEED}")
    row, sizes = MODELS[name]
    save_random(row, folder, **sizes | changes)
    return str(folder)


def asked(vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, drawn = workload(7)
    prompts = [[token % (vocab - 3) + 3 for token in prompt] for prompt in prompts]
    return prompts, [replace(each, max_tokens=min(each.max_tokens, 24), ignore_eos=True) for each in drawn]


@pytest.mark.matrix("name")
@pytest.mark.parametrize(("tensors", "stages", "hosted"), [(4, 1, 0), (2, 2, 40)])
@pytest.mark.parametrize("name", MODELS)
def test_crowding_preemption_and_sleep_change_no_token(
    name: str, tensors: int, stages: int, hosted: int, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a model computes its states sooner than they are copied; here they are to move.
    monkeypatch.setitem(OPERATIONS_PER_SECOND, "cpu", 1.0)
    model = save(name, tmp_path)
    prompts, params = asked(131)
    roomy = {"max_num_seqs": 1, "max_num_batched_tokens": 128}
    whole = [alone(model, [each], [one], **roomy)[0] for each, one in zip(prompts[:3], params[:3], strict=True)]
    whole += alone(model, prompts[3:], params[3:], max_num_batched_tokens=128)
    sizes = {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages, "num_cpu_blocks": hosted,
             "num_gpu_blocks": 9 - (hosted > 0)}  # fmt: skip
    with ranks(model, **CROWDED | sizes) as llm:
        assert llm.generate_tokens(prompts, params) == whole
        stats = llm.engine.stats()
        llm.engine.scheduler.check()
        llm.sleep(1)
        llm.wake_up()
        assert llm.generate_tokens(prompts[:4], params[:4]) == whole[:4]
    assert stats.preemptions > 0
    assert (stats.pages_swapped_in > 0) == (hosted > 0), "states went to the host with their pages, and came back"
    assert 0 < stats.prefix_hits <= stats.prefix_queries, "states of prefixes are kept on every rank"


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_of_a_shape_are_those_of_one_rank(name: str, ranks: Ranks, tmp_path: Path) -> None:
    model = f"shape:{save(name, tmp_path)}"
    prompts, params = asked(131)
    whole = alone(model, prompts, params)
    with ranks(model, **CROWDED, tensor_parallel_size=2, pipeline_parallel_size=2) as llm:
        assert llm.generate_tokens(prompts, params) == whole


@pytest.mark.parametrize("name", MODELS)
def test_choices_of_one_prompt_have_states_of_their_own_on_every_rank(
    name: str, ranks: Ranks, tmp_path: Path
) -> None:
    model, rng = save(name, tmp_path), random.Random(3)
    prompt = [rng.randrange(3, 90) for _ in range(40)]
    params = OfflineParams(n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
    sizes = {"max_model_len": 128, "max_num_seqs": 3, "tokenizer": "shape:tiny"}
    with LLM(model, device="cpu", dtype="float32", page_size=16, cpu_threads=1, **sizes) as llm:
        whole = choices(llm, prompt, params)
    with ranks(model, **sizes, tensor_parallel_size=2, pipeline_parallel_size=2) as llm:
        assert choices(llm, prompt, params) == whole
    assert len(set(map(tuple, whole))) > 1


@pytest.mark.parametrize(
    ("name", "changes", "stages", "mixers"),
    [
        (
            "mamba", {"hybrid_override_pattern": "MM-*-*"}, 2,
            [[Mixer.MAMBA2, Mixer.NONE], [Mixer.ATTENTION, Mixer.NONE]],
        ),
        ("mamba", {"hybrid_override_pattern": "-M*"}, 3, [[Mixer.NONE], [Mixer.MAMBA2], [Mixer.ATTENTION]]),
        (
            "delta",
            {"num_hidden_layers": 3, "layer_types": ["full_attention", "full_attention", "linear_attention"]}, 2,
            [[Mixer.ATTENTION], [Mixer.GATED_DELTA]],
        ),
    ],
)  # fmt: skip
def test_a_stage_may_have_no_state_or_nothing_to_attend_to(
    name: str, changes: dict[str, Any], stages: int, mixers: list[list[Mixer]], ranks: Ranks, tmp_path: Path
) -> None:
    model = save(name, tmp_path, **changes)
    prompts, params = asked(131)
    whole = alone(model, prompts, params)
    with ranks(model, **CROWDED, pipeline_parallel_size=stages, num_cpu_blocks=40) as llm:
        assert llm.generate_tokens(prompts, params) == whole
        executor: Any = llm.engine.executor
        own = executor.decoder.spec.recurrent
        assert sorted(set(own.mixers)) == sorted(mixers[-1])
        assert [state.shape[0] for state in executor.states] == [own.layers] * 2
        assert executor.arena.shape[0] == len(executor.decoder.spec.attending)
        llm.sleep(1)
        llm.wake_up()
        assert llm.generate_tokens(prompts[:2], params[:2]) == whole[:2]
