"""Ranks sleep and wake together, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from stoker_runtime import LLM, SamplingParams
from stoker_runtime.errors import AsleepError, ModelError, UnavailableError
from stoker_runtime.ranks.sleep import RankSleep

Ranks = Callable[..., LLM]
PARAMS = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
PROMPTS = [[at * 7 % 150 + 3 for at in range(first, first + 40)] for first in (1, 30, 2)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, vocab_size=163, initializer_range=0.2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("cut", [(2, 1), (1, 2)])
def test_ranks_sleep_as_one_does(cut: tuple[int, int], checkpoint: Path, ranks: Ranks) -> None:
    sizes: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks": 30, "max_num_seqs": 4, "enable_sleep_mode": True}
    with ranks(str(checkpoint), tensor_parallel_size=cut[0], pipeline_parallel_size=cut[1], **sizes) as llm:
        before = llm.generate_tokens(PROMPTS, PARAMS)
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(AsleepError):
                llm.generate_tokens(PROMPTS, PARAMS)
            llm.wake_up(["kv_cache"])
            assert llm.engine.stats().asleep is (level == 2)
            llm.wake_up()
            assert llm.generate_tokens(PROMPTS, PARAMS) == before


def test_where_one_rank_cannot_none_does(checkpoint: Path, ranks: Ranks) -> None:
    """The leader cannot read its weights, then nobody can; in the end all are there again."""
    file = checkpoint / "model.safetensors"
    tensors, whole = load_file(file), file.read_bytes()
    sizes: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks": 30, "max_num_seqs": 4, "enable_sleep_mode": True}
    with ranks(str(checkpoint), pipeline_parallel_size=2, **sizes) as llm:
        before = llm.generate_tokens(PROMPTS, PARAMS)
        llm.sleep(2)
        freed = llm.engine.stats().bytes_freed
        sleeper: Any = llm.engine.executor.sleeper
        reload = sleeper._reload
        for damage in ("leader", "all"):
            if damage == "leader":
                sleeper._reload = unreadable
            else:
                sleeper._reload = reload
                save_file({name: tensor for name, tensor in tensors.items() if "layers.3.mlp.up" not in name}, file)
            with pytest.raises(ModelError):
                llm.wake_up()
            assert (llm.engine.stats().asleep, llm.engine.stats().bytes_freed) == (True, freed)
        file.write_bytes(whole)
        llm.wake_up()
        assert llm.generate_tokens(PROMPTS, PARAMS) == before


def unreadable() -> None:
    raise ModelError("It cannot be read.")


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_goes_back_when_another_cannot(level: int) -> None:
    """Its own part would do, but the others say no: it keeps nothing, and says who is to be asked."""
    agreed = [1]
    with LLM("shape:tiny", device="cpu", dtype="float32", max_num_seqs=2, enable_sleep_mode=True) as llm:
        executor: Any = llm.engine.executor
        executor.decoder.collectives = SimpleNamespace(least=lambda number: min(number, *agreed))
        before = llm.generate_tokens(PROMPTS, PARAMS)
        sleeper = RankSleep(executor, executor.sleeper._reload)
        llm.engine.sleeper._device = sleeper
        agreed[0] = 0
        with pytest.raises(UnavailableError, match="Another rank"):
            llm.sleep(level)
        assert llm.generate_tokens(PROMPTS, PARAMS) == before
        agreed[0] = 1
        llm.sleep(level)
        freed = sleeper.bytes_freed
        agreed[0] = 0
        with pytest.raises(UnavailableError, match="Another rank"):
            llm.wake_up()
        assert (llm.engine.stats().asleep, sleeper.bytes_freed) == (True, freed)
        agreed[0] = 1
        llm.wake_up()
        assert llm.generate_tokens(PROMPTS, PARAMS) == before
