"""Sampling from logits without a model: the engine's choice, row by row."""

from __future__ import annotations

import pytest
import torch

from stoker_runtime import SamplingParams, StructuredOutputsParams, sample
from stoker_runtime.errors import RequestError

VOCAB = 300


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def test_greedy_is_the_likeliest(logits: torch.Tensor) -> None:
    kept = logits.clone()
    assert sample(logits, SamplingParams(temperature=0.0)) == logits.argmax(1).tolist()
    assert sample(logits, SamplingParams(top_k=1, seed=3)) == logits.argmax(1).tolist()
    assert torch.equal(kept, logits)
    assert sample(logits[:0]) == []


def test_a_seed_gives_the_same_in_any_company(logits: torch.Tensor) -> None:
    params = [SamplingParams(seed=row, temperature=1.5) for row in range(6)]
    together = sample(logits, params)
    alone = [sample(logits[row : row + 1], params[row])[0] for row in range(6)]
    assert together == alone
    assert together != logits.argmax(1).tolist()


def test_tokens_come_as_often_as_they_are_likely() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = sample(row.repeat(4000, 1), [SamplingParams(seed=seed) for seed in range(4000)])
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    assert torch.allclose(shares, row.softmax(0), atol=0.03)


def test_rules_of_tokens(logits: torch.Tensor) -> None:
    best = logits.argmax(1).tolist()
    second = logits.scatter(1, torch.tensor(best)[:, None], -1e9).argmax(1).tolist()
    greedy = {"temperature": 0.0}
    allowed = sample(logits, [SamplingParams(**greedy, allowed_token_ids=[7, 290]) for _ in best])  # type: ignore[arg-type]
    assert allowed == [max((7, 290), key=lambda token, row=row: row[token]) for row in logits.tolist()]
    assert sample(logits, [SamplingParams(**greedy, bad_words=[(token,)]) for token in best]) == second  # type: ignore[arg-type]
    phrases = [SamplingParams(**greedy, bad_words=[(5, token)]) for token in best]  # type: ignore[arg-type]
    assert sample(logits, phrases) == best
    assert sample(logits, phrases, outputs=[[5]] * 6) == second
    assert sample(logits, [SamplingParams(**greedy, logit_bias={9: 100}) for _ in best]) == [9] * 6  # type: ignore[arg-type]
    stops = [SamplingParams(**greedy, stop_token_ids=[token], min_tokens=2) for token in best]  # type: ignore[arg-type]
    assert sample(logits, stops, prompts=[[1]] * 6, outputs=[[2]] * 6) == second
    assert sample(logits, stops, prompts=[[1]] * 6, outputs=[[2, 2]] * 6) == best


def test_penalties_go_by_the_texts(logits: torch.Tensor) -> None:
    best = logits.argmax(1).tolist()
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    again = sample(logits, params, prompts=[[1]] * 6, outputs=[[token] * 9 for token in best])
    assert all(one != other for one, other in zip(again, best, strict=True))
    assert sample(logits, params, prompts=[[token] for token in best]) == best


def test_what_cannot_be(logits: torch.Tensor) -> None:
    for fields, says in (
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, "need a model's tokenizer"),
        ({"bad_words": ["word"]}, "need a model's tokenizer"),
        ({"top_p": 0.0}, "top_p must be"),
    ):
        with pytest.raises(RequestError, match=says):
            sample(logits, SamplingParams(**fields))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="6 rows of logits and 2 prompts"):
        sample(logits, prompts=[[1]] * 2)
