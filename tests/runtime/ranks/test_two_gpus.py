"""Two GPUs give the tokens of one, in graphs, and a rank that is lost ends all of them; each rank is on its own GPU.

Models are random ones of a known shape, so that nothing is fetched; what is compared runs in bfloat16.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import secrets
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from tests.runtime.ranks.conftest import free_port
from tests.runtime.ranks.server import Server
from tests.runtime.ranks.stream import Stream, struck
from tests.runtime.ranks.test_faults import PATIENCE, children, wait_for

from stoker_runtime import LLM
from stoker_runtime import SamplingParams as OfflineParams
from stoker_runtime.errors import ConfigError
from stoker_runtime.nodes import SECRET_VARIABLE
from stoker_runtime.process.stat import process_exists
from stoker_runtime.ranks.executors import LeadingExecutor
from stoker_runtime.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices"),
]
MODEL = "shape:qwen2.5-7b"
PROMISED = 5.0
"""Seconds from a fault to the end of every stream and rank. The server says what was for as long again, then ends."""
LITTLE = 64 * 2**20
MAKES = "Init COMPLETE|Connected all|via (P2P|SHM|NET)|comm 0x"
"""What NCCL says when it makes a communicator or connects."""
SIZES: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks": 200, "max_num_seqs": 16, "dtype": "bfloat16"}
# A prompt whose beginning is cached is multiplied in other tiles, and a random model's near ties show it.
SIZES |= {"enable_prefix_caching": False}
NEAR, NEAR_FP8 = 0.9, 0.2
"""Of all first tokens this share is the same: sums in another order change the last bits, and with them near ties. In
FP8 each rank rounds its own part of a row by a scale of its own: of 24, 11 were the same; by chance none would be."""


def workload(vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(11)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.choice([3, 40, 300]))] for _ in range(24)]
    return prompts, [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * len(prompts)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen2.5-7b", {}),
        ("qwen2.5-7b", {"quantization": "fp8"}),
        ("qwen2.5-7b", {"quantization": "w4"}),
        ("qwen2.5-7b", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
        ("qwen3-30b-a3b", {}),
        ("qwen3-30b-a3b", {"enable_expert_parallel": True}),
        ("nemotron-h-8b@16", {}),
        ("qwen3-next-80b-a3b@4", {}),
        ("qwen3-next-80b-a3b@4", {"enable_expert_parallel": True}),
        ("qwen3-next-80b-a3b-fp8@4", {"quantization": "fp8"}),
    ],
)
def test_two_gpus_give_the_tokens_of_one(shape: str, options: dict[str, Any]) -> None:
    """In graphs and launched kernel by kernel; and twice the same, whatever else runs."""
    alone = {key: value for key, value in options.items() if "parallel" not in key}
    with LLM(f"shape:{shape}", **SIZES, **alone) as llm:
        prompts, params = workload(1000)
        whole = llm.generate_tokens(prompts, params)
    two: dict[str, Any] = {"tensor_parallel_size": 2} | options
    with LLM(f"shape:{shape}", **SIZES, **two) as llm:
        cut = llm.generate_tokens(prompts, params)
        again = llm.generate_tokens(prompts, params)
        while llm.engine.executor.idle():
            pass
        assert cast(LeadingExecutor, llm.engine.executor).graphs.captured > 0
        graphed = llm.generate_tokens(prompts, params)
    assert cut == again
    assert cut == graphed
    same = sum(mine[0] == theirs[0] for mine, theirs in zip(cut, whole, strict=True))
    near = NEAR_FP8 if options.get("quantization") == "fp8" else NEAR
    assert same >= near * len(prompts), (same, len(prompts))


def test_a_start_that_fails_is_tried_again_in_the_same_process() -> None:
    """Ranks have met by then, or are meeting."""
    few = SIZES | {"num_gpu_blocks": 0, "gpu_memory_utilization": 0.02}
    free: list[list[int]] = []
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"gpu.memory.utilization"):
            LLM(MODEL, **few, tensor_parallel_size=2)
        assert not torch.distributed.is_initialized()
        free.append(free_bytes())
    assert nothing_taken(free[0]), "each start leaves something on a GPU"
    with LLM(MODEL, **SIZES, tensor_parallel_size=2) as llm:
        assert len(llm.generate_tokens([[1, 2, 3]], OfflineParams(max_tokens=5, ignore_eos=True))[0]) == 5


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen2.5-7b@3", {}),
        ("qwen2.5-7b@3", {"quantization": "fp8", "quantize_head": "fp8"}),
        ("qwen2.5-7b@3", {"disable_custom_all_reduce": True}),
        ("qwen3-30b-a3b@2", {"batch_invariant": True}),
        ("llama-3.1-8b@3", {"dtype": "float16"}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_that_sample_together_choose_what_the_leader_does(
    shape: str, options: dict[str, Any], temperature: float
) -> None:
    """Who asks for log-probabilities has all logits gathered on one GPU, which samples; eager, then in graphs."""
    prompts, params = workload(1000)
    drawn = [replace(each, temperature=temperature, top_p=0.9, seed=at) for at, each in enumerate(params)]
    scored = [replace(each, logprobs=0) for each in drawn]
    with LLM(f"shape:{shape}", **SIZES | options, tensor_parallel_size=2) as llm:
        for _ in range(3):
            together = llm.generate_tokens(prompts, drawn)
            assert together == llm.generate_tokens(prompts, scored)
            while llm.engine.executor.idle():
                pass
    assert len({tuple(each) for each in together}) > 1


LONG: dict[str, Any] = SIZES | {"max_model_len": 16_000, "num_gpu_blocks": 4000, "max_num_batched_tokens": 16_000}


def exchanges(llm: LLM) -> int:
    """How often ranks have shared out rows."""
    shares = cast(LeadingExecutor, llm.engine.executor).decoder.collectives.row_shares
    assert shares is not None
    return shares.exchanges


@pytest.mark.parametrize("shape", ["qwen2.5-7b", "qwen3-30b-a3b@12"])
def test_two_gpus_that_share_out_rows_give_the_tokens_of_one(shape: str) -> None:
    """Prompts of thousands of tokens, several of them in one step, and one step after the other."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1000) for _ in range(rng.randint(2000, 15_000))] for _ in range(12)]
    params = [SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)] * len(prompts)
    with LLM(f"shape:{shape}", **LONG) as llm:
        whole = llm.generate_tokens(prompts, params)
    with LLM(f"shape:{shape}", **LONG, tensor_parallel_size=2) as llm:
        before = exchanges(llm)
        cut = llm.generate_tokens(prompts, params)
        assert exchanges(llm) > before + 20
        assert cut == llm.generate_tokens(prompts, params)
    same = sum(mine[0] == theirs[0] for mine, theirs in zip(cut, whole, strict=True))
    assert same >= (NEAR - 0.15) * len(prompts), (same, len(prompts))


def test_rows_that_are_shared_out_in_fp8_score_prompts_as_others_do() -> None:
    """Of a random model in FP8 few tokens survive another rounding; what it thinks of thousands of tokens does."""
    rng = random.Random(6)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(7000)]} for _ in range(2)]
    params = OfflineParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scores = []
    shared: dict[str, Any] = {"tensor_parallel_size": 2}
    for options in (shared, shared | {"disable_custom_all_reduce": True}, {}):
        with LLM("shape:qwen2.5-7b", **LONG, quantization="fp8", **options) as llm:
            before = exchanges(llm) if options is shared else 0
            records = llm.generate(prompts, params, use_tqdm=False)
            assert options is not shared or exchanges(llm) > before + 20
        tokens = [each for record in records for each in record.prompt_logprobs or [] if each is not None]
        scores.append(torch.tensor([next(iter(each.values())).logprob for each in tokens]))
    assert scores[0].shape == (2 * 6999,)
    alike = torch.corrcoef(torch.stack(scores)).tolist()
    print(f"correlation of shared rows with plain ones {alike[0][1]:.3f}, with one GPU {alike[0][2]:.3f}; ", end="")
    print(f"of plain ones with one GPU {alike[1][2]:.3f}")
    assert alike[0][1] > 0.8
    assert alike[0][2] >= alike[1][2] - 0.02


# Sizes of four layers of models that need something else of each other than sums of what layers give.
COMMON: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    # One group, of which each rank has half: its norm is over both.
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "MM*-", "n_groups": 1, "mamba_num_heads": 32, "mamba_head_dim": 64,
        "ssm_state_size": 128, "conv_kernel": 4, "head_dim": 128,
    },
    # Norms over all heads.
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-6, "rope_theta": 5e5},
    # Heads that see blocks of their own, tokens that nobody writes.
    "Phi3SmallForCausalLM": {
        "ff_intermediate_size": 5632, "hidden_act": "gegelu", "gegelu_limit": 20.0, "layer_norm_epsilon": 1e-5,
        "rope_embedding_base": 1e6, "rope_position_scale": 1.0, "mup_use_scaling": True, "mup_attn_multiplier": 1.0,
        "mup_embedding_multiplier": 10.0, "mup_width_multiplier": 8.0, "dense_attention_every_n_layers": 2,
        "blocksparse_block_size": 64, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 4,
        "blocksparse_homo_head_pattern": False, "dummy_token_indices": [900, 905, 31000],
    },
    # Slopes, and a norm of the embedding.
    "BloomForCausalLM": {"n_layer": 4, "n_head": 16, "layer_norm_epsilon": 1e-5, "seq_length": 2048},
}  # fmt: skip


@pytest.mark.parametrize("architecture", KINDS)
def test_two_gpus_give_the_tokens_of_one_of_rarer_kinds(architecture: str, tmp_path: Path) -> None:
    settings = {**COMMON, **KINDS[architecture], "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    prompts, params = workload(1000)
    with LLM(f"shape:{tmp_path}", **SIZES) as llm:
        whole = llm.generate_tokens(prompts, params)
    with LLM(f"shape:{tmp_path}", **SIZES, tensor_parallel_size=2) as llm:
        cut = llm.generate_tokens(prompts, params)
        while llm.engine.executor.idle():
            pass
        assert llm.generate_tokens(prompts, params) == cut
    same = sum(mine[0] == theirs[0] for mine, theirs in zip(cut, whole, strict=True))
    assert same >= NEAR * len(prompts), (same, len(prompts))


@pytest.mark.parametrize(
    "options",
    [("--tensor-parallel-size", "2"), ("--tensor-parallel-size", "2", "--disable-custom-all-reduce"),
     ("--pipeline-parallel-size", "2")],
)  # fmt: skip
def test_nccl_makes_nothing_once_the_server_is_ready(options: tuple[str, ...], tmp_path: Path) -> None:
    """No communicator and no connection, whatever lengths and numbers of prompts come."""
    rng = random.Random(9)
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P", "NCCL_DEBUG_FILE": f"{tmp_path}/%p"}
    server = Server(MODEL, "--max-model-len", "12000", "--max-num-batched-tokens", "12000", *options, **variables)
    try:
        url = server.wait_ready(PATIENCE)
        before = {path: path.read_text() for path in tmp_path.iterdir()}
        assert len(before) >= 2
        assert all(re.search(MAKES, text) for text in before.values())
        for count in (1, 40, 5):
            lengths = [rng.choice([3, 90, 700, 11_000 // count]) for _ in range(count - 1)] + [11_000]
            prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in lengths]
            body = {"model": MODEL, "prompt": prompts, "max_tokens": 9, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        for path in tmp_path.iterdir():
            later = path.read_text().removeprefix(before.get(path, ""))
            assert not re.search(MAKES, later), later
    finally:
        server.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_streams_and_server_within_seconds(number: signal.Signals) -> None:
    free = free_bytes()
    server = Server(MODEL, "--tensor-parallel-size", "2", "--max-model-len", "4096")
    try:
        url = server.wait_ready(PATIENCE)
        ranks = ranks_of(server)
        stream = Stream(url, MODEL, 4000, PATIENCE)
        stream.wait_begun()
        os.kill(ranks[1], number)
        assert_all_ends(server, url, ranks, stream, free, time.monotonic())
    finally:
        server.close()


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("fault", ["silence", "memory", "device"])
def test_a_fault_of_a_rank_ends_streams_and_server_within_seconds(fault: str, rank: int, tmp_path: Path) -> None:
    """It never comes to an exchange, for which the other one's GPU waits; or it has no memory, or no device."""
    free = free_bytes()
    server = Server(MODEL, "--tensor-parallel-size", "2", "--max-model-len", "4096", **struck(fault, rank, tmp_path))
    try:
        url = server.wait_ready(PATIENCE)
        ranks = ranks_of(server)
        stream = Stream(url, MODEL, 4000, PATIENCE)
        stream.wait_begun()
        (tmp_path / "now").touch()
        wait_for((tmp_path / "struck").exists, "no rank had the fault")
        assert_all_ends(server, url, ranks, stream, free, float((tmp_path / "struck").read_text()))
    finally:
        server.close()


def ranks_of(server: Server) -> list[int]:
    """The processes of its two ranks, the leader's first."""
    (leader,) = children(server.pid)
    (follower,) = children(leader)
    return [leader, follower]


def assert_all_ends(
    server: Server, url: str, ranks: list[int], stream: Stream, free: list[int], begun: float
) -> None:
    """What is promised, since a fault `begun`: nothing is left, of the GPUs' memory either, of which so much was `free`
    before. A GPU's machine has processors to spare.
    """
    stream.wait_ended()
    wait_for(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503, "it never said that it is unwell")
    wait_for(lambda: not any(map(process_exists, ranks)), "a rank is left")
    wait_for(lambda: nothing_taken(free), "memory of a GPU is left taken")
    freed = time.monotonic() - begun
    assert server.exit_status(PATIENCE) == 1
    exited = time.monotonic() - begun
    print(f"streams ended after {stream.ended - begun:.2f} s, GPUs were free after {freed:.2f}, no server {exited:.2f}")
    assert len(stream.errors) == 1
    assert stream.ended - begun < PROMISED
    assert freed < PROMISED
    assert exited < PROMISED


@pytest.mark.parametrize("sizes", [("--pipeline-parallel-size", "2"), ("--tensor-parallel-size", "2")])
def test_two_nodes_with_a_gpu_each_give_the_tokens_of_one_machine_with_two(
    sizes: tuple[str, str], tmp_path: Path
) -> None:
    """Nodes of one machine, of which each sees one GPU and which have nothing between them but TCP. Spread over nodes,
    sums go by NCCL: so they do on the one.
    """
    model = ("shape:qwen2.5-7b", "--max-model-len", "1024", "--num-gpu-blocks", "200", "--disable-custom-all-reduce")
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    apart = {
        SECRET_VARIABLE: secrets.token_hex(16), "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/%p",
    }  # fmt: skip
    ways: list[list[tuple[tuple[str, ...], dict[str, str]]]] = [
        [(sizes, {})],
        [
            ((*sizes, *nodes, "--node-rank", str(number)), {"CUDA_VISIBLE_DEVICES": str(number), **apart})
            for number in (0, 1)
        ],
    ]
    texts, free = [], free_bytes()
    for way in ways:
        groups = [Server(*model, *arguments, **variables) for arguments, variables in way]
        try:
            url = groups[0].wait_ready(PATIENCE)
            body = {"model": model[0], "prompt": "a b c", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            texts.append(answer.json()["choices"][0]["text"])
        except (AssertionError, httpx.HTTPError) as error:
            raise AssertionError("\n".join(server.log for server in groups)) from error
        finally:
            for server in groups:
                server.close()
        wait_for(lambda: nothing_taken(free), "memory of a GPU is left taken")
    assert texts[0] == texts[1]
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert sum("via NET/Socket" in each for each in told) == 2
    assert not any(re.search("via (P2P|SHM)", each) for each in told)


def free_bytes() -> list[int]:
    """What of each GPU nobody holds. This process has a context there, too."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(index)[0] for index in range(2)]


def nothing_taken(free: list[int]) -> bool:
    """Whether as much of each GPU is free as was; the driver keeps some pages of its own."""
    return all(now >= before - LITTLE for now, before in zip(free_bytes(), free, strict=True))
