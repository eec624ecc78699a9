"""`--data-parallel-size`, a GPU for each engine: both answer, with one engine's tokens, and one that dies ends both."""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
import signal
from pathlib import Path

import httpx
import pytest
import torch
from tests.runtime.ranks.server import Server
from tests.runtime.ranks.test_faults import PATIENCE, children, wait_for
from tests.runtime.ranks.test_two_gpus import free_bytes, nothing_taken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices"),
]
MODEL = "shape:qwen2.5-7b"
SIZES = ("--max-model-len", "2048", "--num-gpu-blocks", "2000", "--batch-invariant")
ENGINE = "stoker_runtime.engine"
WEIGHTS = 14 * 2**30
"""Of the model in 16 bits, a little less."""


def answers(url: str, prompts: list[list[int]]) -> list[str]:
    """All at once."""

    def ask(prompt: list[int]) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
        assert answer["usage"]["completion_tokens"] == 48
        return str(answer["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def generated(url: str) -> list[float]:
    """Tokens of each engine, in their order."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    found = re.findall(r'^vllm:generation_tokens_total{engine="(\d)".*} (\S+)$', text, re.MULTILINE)
    assert [number for number, _ in found] == ["0", "1"], text
    return [float(count) for _, count in found]


def test_each_engine_has_a_gpu_and_answers_as_one_does() -> None:
    free = free_bytes()
    rng = random.Random()
    prompts = [[rng.randrange(3, 1000) for _ in range(rng.randint(1, 900))] for _ in range(24)]
    texts = []
    for engines in (1, 2):
        server = Server(MODEL, *SIZES, "--data-parallel-size", str(engines))
        try:
            url = server.wait_ready(PATIENCE)
            taken = [before - now for before, now in zip(free, free_bytes(), strict=True)]
            assert [each > WEIGHTS for each in taken] == [True, engines == 2]
            texts.append(answers(url, prompts))
            if engines == 2:
                wait_for(lambda url=url: sum(generated(url)) >= 24 * 48, "the engines did not tell of all tokens")
                assert min(generated(url)) >= 24 * 48 / 6, "a share that is not worth a GPU"
                processes = [pid for pid in children(server.pid) if ENGINE in Path(f"/proc/{pid}/cmdline").read_text()]
                assert len(processes) == 2
                os.kill(rng.choice(processes), signal.SIGKILL)
                assert server.exit_status(PATIENCE) == 1
                assert "ended with signal SIGKILL" in server.log
        finally:
            server.close()
        wait_for(lambda: nothing_taken(free), "memory of a GPU is left taken")
    assert texts[0] == texts[1]
