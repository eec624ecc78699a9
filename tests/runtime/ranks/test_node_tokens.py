"""Ranks on several nodes give one rank's tokens. Nodes are on the loopback; everything between them is real."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tests.runtime.ranks.test_tokens import SIZES, alone, workload
from transformers import LlamaConfig, LlamaForCausalLM

from stoker_runtime import LLM
from stoker_runtime.request import SamplingParams

Ranks = Callable[..., LLM]


def test_a_model_over_nodes_gives_the_tokens_of_the_whole(ranks: Ranks, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Stages on nodes, stages of two ranks each, and a stage that is spread over nodes."""
    model = str(tiny_checkpoint("llama"))
    prompts, params = workload(10, 128)
    whole = alone(model, prompts, params)
    for nodes, tensors, stages in ((2, 1, 2), (2, 2, 2), (3, 1, 3), (2, 2, 1)):
        sizes = {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages, "nnodes": nodes}
        with ranks(model, **SIZES, **sizes) as llm:
            assert llm.generate_tokens(prompts, params) == whole, sizes


def saved(folder: Path, layers: int) -> str:
    torch.manual_seed(layers)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, vocab_size=163, initializer_range=0.2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_pages_are_those_of_the_node_with_the_least_room_and_all_sleep_together(ranks: Ranks, tmp_path: Path) -> None:
    """Of five layers the node beside the leader's has three, and so as many pages as a model of three."""
    five, three = saved(tmp_path / "five", 5), saved(tmp_path / "three", 3)
    prompts = [[random.randrange(3, 160) for _ in range(50)]]
    params = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)]
    sizes = {"max_model_len": 96, "max_num_seqs": 4, "enable_sleep_mode": True, "cpu_kv_gb": 0.004}
    with LLM(three, device="cpu", dtype="float32", page_size=16, cpu_threads=1, **sizes) as llm:
        pages = llm.engine.executor.num_pages
    whole = alone(five, prompts, params)
    with ranks(five, pipeline_parallel_size=2, nnodes=2, **sizes) as llm:
        assert llm.engine.executor.num_pages == pages
        assert llm.generate_tokens(prompts, params) == whole
        llm.sleep(2)
        llm.wake_up()
        assert llm.generate_tokens(prompts, params) == whole


def test_a_leader_by_name_is_met_on_whatever_address_the_name_has(ranks: Ranks) -> None:
    """It listens on all of its addresses, IPv6 where there is any, and so do the ranks' meetings."""
    prompts, params = [[5, 6, 7]], [SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)]
    whole = alone("shape:tiny", prompts, params)
    with ranks("shape:tiny", **SIZES, pipeline_parallel_size=2, nnodes=2, master_addr="localhost") as llm:
        assert llm.generate_tokens(prompts, params) == whole
