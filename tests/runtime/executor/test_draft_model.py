"""A model that drafts: what it says against transformers, what it takes of the device, and what cannot draft."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.drafts.random_pace import decide_by_chance
from tests.runtime.executor.test_speculation import METHODS, build, random_llama, requests, smaller
from transformers import LlamaForCausalLM

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.launched import Launched
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.step.batch import Batch


class Listener:
    """Runs batches, and compares what the draft model says in each with transformers on the whole text."""

    def __init__(self, executor: Executor, oracle: LlamaForCausalLM) -> None:
        self.executor, self.oracle = executor, oracle
        self.compared = self.caught_up = 0
        self._execute = executor.execute

    def execute(self, batch: Batch) -> Launched:
        speculation = self.executor.body.speculation
        assert speculation is not None
        assert speculation.drafter is not None
        known = [
            speculation.history[slot, : int(self.executor.body.slots.position[slot]) + 1].tolist()
            for slot in batch.decodes
        ]
        launched = self._execute(batch)
        self.caught_up += sum(len(chunk.token_ids) for chunk in batch.catch_ups)
        drafts = speculation.drafts(len(batch.decodes), batch.drafts).tolist()
        for row, cap in enumerate(batch.draft_caps):
            said = [column[row] for column in drafts]
            assert min(said[:cap], default=0) >= 0, "a draft is missing"
            assert set(said[cap:]) <= {-1}, "a draft beyond the cap"
            if cap:
                last = speculation.drafter._logits[row] if cap == batch.drafts else None
                self._compare(known[row], said[:cap], last)
        return launched

    @torch.inference_mode()
    def _compare(self, known: list[int], said: list[int], logits: torch.Tensor | None) -> None:
        expected = self.oracle(torch.tensor([known + said[:-1]])).logits[0, len(known) - 1 :]
        assert expected.argmax(-1).tolist() == said
        if logits is not None:
            torch.testing.assert_close(logits, expected[-1], rtol=1e-3, atol=1e-3)
        self.compared += 1


def crowd(executor: Executor, listener: Listener, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crowd `executor` with greedy requests, and have `listener` compare what is drafted."""
    monkeypatch.setattr(executor, "execute", listener.execute)
    executor.host_page_tokens = 0.0  # so small a model is rather computed again than copied
    rng = random.Random(seed)
    loop = StepLoop(executor, EngineConfig(model="", scheduling_policy="priority"))
    decide_by_chance(loop, rng)
    # Only greedy ones: what is sampled follows the model's odds, and that no text differs is another test's.
    asked = [each for each in requests(rng, executor.vocab_size, 60) if each.params.temperature == 0.0]
    while asked or loop.has_work:
        if asked and rng.random() < 0.3:
            loop.add(asked.pop(0))
        loop.step()
        loop.scheduler.check()
    stats = loop.stats()
    assert listener.compared > 100
    assert listener.caught_up > 300
    assert min(stats.preemptions, stats.prefix_hits, stats.pages_swapped_in) > 0, "the device was meant to be crowded"
    executor.close()


def test_drafts_are_what_transformers_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_llama(tmp_path, 71)
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 23, "num_gpu_blocks": 14, "num_cpu_blocks": 9}
    executor = build(model, "draft_model", **sizes)
    oracle = LlamaForCausalLM.from_pretrained(smaller(model, 0.1), dtype=torch.float32)
    crowd(executor, Listener(executor, oracle), 71, monkeypatch)


def drafted_by(model: str, draft: str, **sizes: int) -> EngineConfig:
    speculation = json.dumps(METHODS["draft_model"] | {"model": draft})
    given = {"max_model_len": 96, "page_size": 16, **sizes}
    return EngineConfig(model=model, device="cpu", dtype="float32", speculative_config=speculation, **given)  # type: ignore[arg-type]


def test_pages_and_weights_of_both_models_are_counted(tmp_path: Path) -> None:
    model = random_llama(tmp_path, 3)
    executor = build_executor(drafted_by(model, smaller(model, 0.0), cpu_kv_gb=1))
    drafter = executor.drafter
    assert drafter is not None
    assert len(drafter.arena[0, 0]) == len(executor.arena[0, 0]) == executor.num_pages
    assert executor.plan.kv_bytes == executor.arena.nbytes + drafter.arena.nbytes <= 1 << 30
    assert executor.plan.weights > drafter.model.weights > 0
    plain = build(model, "", cpu_kv_gb=1)
    assert executor.plan.weights - drafter.model.weights == plain.plan.weights
    assert plain.num_pages > executor.num_pages > (1 << 30) // executor.plan.page_bytes - 1
    assert executor.plan.state > plain.plan.state + drafter.model.state
    assert "draft" in executor.describe()["draft_model"]
    for each in (executor, plain):
        each.close()


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    model, other = random_llama(tmp_path, 5, 77), random_llama(tmp_path / "other", 6, 91)
    with pytest.raises(ConfigError, match="vocabulary of 91 tokens, but the model's has 77"):
        build_executor(drafted_by(model, other))
    folder = Path(smaller(model, 0.0))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 90}))
    with pytest.raises(ConfigError, match="positions up to 90, but max_model_len is 96; set --max-model-len to 90"):
        build_executor(drafted_by(model, str(folder)))
    with pytest.raises(ModelError, match=r"^speculative_config: .*no such folder"):
        build_executor(drafted_by(model, str(tmp_path / "nowhere")))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        build_executor(drafted_by(model, str(folder)))
