"""Beam search and best_of over HTTP: a tiny model against transformers, through the `openai` package."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from api_server import Running, wait_until
from constrained_server import client_of
from fake_engine import EOS
from transformers import LlamaConfig, LlamaForCausalLM

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.request import TokenLogprobs
from stoker_runtime.text.tokenizer import Tokenizer

VOCAB = 256
PROMPTS = [[70, 71, 72, 73, 74], list(range(30, 70))]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, **sizes)
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.normal_(std=0.6)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[openai.AsyncOpenAI]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", max_model_len=128, page_size=16, max_num_seqs=8, num_gpu_blocks=64
    )
    async with (
        await AsyncEngine.start(config, log_level="error") as engine,
        client_of(engine, Tokenizer.synthetic(VOCAB)) as found,
    ):
        yield found


@pytest.mark.asyncio(loop_scope="module")
class TestBeamSearch:
    """On a real engine process."""

    @pytest.mark.parametrize("width", [1, 4])
    async def test_as_transformers(self, client: openai.AsyncOpenAI, model: LlamaForCausalLM, width: int) -> None:
        # Where nothing ends early both rank by the sum of log-probabilities.
        extra = {"use_beam_search": True, "return_token_ids": True, "ignore_eos": True}
        answer = await client.completions.create(
            model="byte-model", prompt=PROMPTS, n=width, max_tokens=12, logprobs=2, extra_body=extra
        )
        for number, prompt in enumerate(PROMPTS):
            theirs = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=12,
                do_sample=False,
                length_penalty=0.0,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            mine = answer.choices[number * width : (number + 1) * width]
            assert (
                [choice.model_extra["token_ids"] for choice in mine]
                == [  # type: ignore[index]
                    tokens[len(prompt) :].tolist() for tokens in theirs.sequences
                ]
            )
            for rank, choice in enumerate(mine):
                assert choice.finish_reason == "length"
                assert choice.logprobs is not None
                assert choice.logprobs.token_logprobs is not None
                total = sum(value for value in choice.logprobs.token_logprobs if value is not None)
                if width > 1:
                    assert total == pytest.approx(float(theirs.sequences_scores[rank]), abs=1e-3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(PROMPTS) * width * 12

    async def test_it_is_the_best_of_what_greedy_and_sampling_find(self, client: openai.AsyncOpenAI) -> None:
        async def total(**asked: Any) -> float:
            answer = await client.completions.create(
                model="byte-model", prompt=PROMPTS[:1], max_tokens=6, logprobs=0, **asked
            )
            found = answer.choices[0].logprobs
            assert found is not None
            assert found.token_logprobs is not None
            return sum(value for value in found.token_logprobs if value is not None)

        beams = await total(n=5, extra_body={"use_beam_search": True, "ignore_eos": True})
        greedy = await total(temperature=0, extra_body={"ignore_eos": True})
        assert beams >= greedy - 1e-4

    async def test_chat_ends_at_eos_and_at_stop_ids(self, client: openai.AsyncOpenAI) -> None:
        extra = {"use_beam_search": True, "stop_token_ids": list(range(3, 67)), "return_token_ids": True}
        answer = await client.chat.completions.create(
            model="byte-model", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=20, extra_body=extra
        )
        stopped = [choice for choice in answer.choices if choice.finish_reason == "stop"]
        assert stopped
        for choice in stopped:
            extra_fields = choice.model_extra or {}
            last = extra_fields["token_ids"][-1]
            assert extra_fields["stop_reason"] == (None if last == 2 else last)
            assert not set(extra_fields["token_ids"][:-1]) & set(range(3, 67))


def test_a_client_that_goes_away_ends_the_search(server: Running) -> None:
    server.engine.delay = 0.05
    body = {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 200}
    with httpx.Client(base_url=server.url, timeout=0.4) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/completions", json=body)
    assert wait_until(lambda: not server.state.active)
    asked = len(server.engine.requests)
    assert 2 <= asked < 60
    time.sleep(0.2)
    assert len(server.engine.requests) == asked, "no more steps"


def test_best_of_keeps_the_likeliest_per_token(server: Running, http: httpx.Client) -> None:
    said = {0: [97, 98, EOS], 1: [99, EOS], 2: [100, 101, 102, EOS]}
    server.engine.script = lambda request: said[(request.params.seed or 0) - 5]
    scores = {97: -1.0, 98: -1.0, 99: -0.2, 100: -0.1, 101: -0.1, 102: -2.0, EOS: -0.5}
    server.engine.entry_of = lambda token, top: TokenLogprobs(scores[token], 1, ())
    body = {"prompt": ["x", "y"], "seed": 5, "n": 2, "best_of": 3, "max_tokens": 9}
    answer = http.post("/v1/completions", json=body).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "c"),
        (1, "def"),
        (2, "c"),
        (3, "def"),
    ]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 9
    families = {request.family for request in server.engine.requests}
    assert len(families) == 2, "the choices of one prompt share its pages"
    assert [len(request.prompt_token_ids) for request in server.engine.requests] == [1] * 6
