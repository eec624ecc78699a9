"""Beam search against an exhaustive search, and against a plain one that never stops early, on a made-up model."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from stoker_runtime.request import TokenLogprobs
from stoker_runtime.sampling.beam import Beam, BeamSearch

VOCAB, EOS = 5, 0
PROMPT = 3


class Model:
    """Log-probabilities of the next token, drawn once for each text."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{self.seed}/{tokens}")
        weights = [rng.random() ** 3 + 0.01 for _ in range(VOCAB)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def top(self, tokens: tuple[int, ...], count: int) -> TokenLogprobs:
        found = sorted(enumerate(self(tokens)), key=lambda pair: -pair[1])[:count]
        return TokenLogprobs(found[0][1], 1, tuple(found))


def search(model: Model, width: int, max_tokens: int, penalty: float, stops: frozenset[int]) -> tuple[BeamSearch, int]:
    found = BeamSearch(PROMPT, width, max_tokens, length_penalty=penalty, stops=stops)
    steps = 0
    while not found.done:
        found.take([model.top(beam.tokens, found.branches) for beam in found.live])
        steps += 1
    return found, steps


def score(model: Model, tokens: tuple[int, ...], penalty: float) -> float:
    total = sum(model(tokens[:at])[token] for at, token in enumerate(tokens))
    return total / (PROMPT + len(tokens) - (tokens[-1] == EOS)) ** penalty


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(6))
def test_a_search_wide_enough_finds_the_best_of_all(seed: int, penalty: float) -> None:
    model, longest = Model(seed), 3
    texts = [
        (*body, last)
        for length in range(longest)
        for body in itertools.product(range(1, VOCAB), repeat=length)
        for last in (range(VOCAB) if length == longest - 1 else [EOS])
    ]
    best = sorted(texts, key=lambda text: score(model, text, penalty), reverse=True)
    found, _ = search(model, 125, longest, penalty, frozenset({EOS}))
    assert [beam.tokens for beam in found.best()[:20]] == best[:20]
    for beam in found.best()[:20]:
        assert found.score(beam) == pytest.approx(score(model, beam.tokens, penalty))


def plain(model: Model, width: int, max_tokens: int, penalty: float) -> list[tuple[int, ...]]:
    """The same search written down without haste."""
    live, ended = [((), 0.0)], []
    for _ in range(max_tokens):
        longer = [
            ((*tokens, token), total + logprob)
            for tokens, total in live
            for token, logprob in model.top(tokens, 2 * width).top
        ]
        ended += [entry for entry in longer if entry[0][-1] == EOS]
        live = sorted((entry for entry in longer if entry[0][-1] != EOS), key=lambda entry: -entry[1])[:width]
    ranked = sorted([*ended, *live], key=lambda entry: score(model, entry[0], penalty), reverse=True)
    return [tokens for tokens, _ in ranked[:width]]


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 1.0, 3.0])
def test_stopping_early_changes_nothing_and_saves_steps(penalty: float) -> None:
    saved = 0
    for seed in range(40):
        width, max_tokens = 1 + seed % 4, 8
        found, steps = search(Model(seed), width, max_tokens, penalty, frozenset({EOS}))
        assert [beam.tokens for beam in found.best()] == plain(Model(seed), width, max_tokens, penalty)
        saved += max_tokens - steps
    assert saved > 0 or penalty > 1, "a large penalty lets long answers hope to the end"


def test_without_stops_it_runs_to_the_end_by_total_alone() -> None:
    found, steps = search(Model(1), 3, 6, 1.0, frozenset())
    assert steps == 6
    totals = [beam.total for beam in found.best()]
    assert totals == sorted(totals, reverse=True)
    assert all(beam.ended_by is None and len(beam.tokens) == 6 for beam in found.best())


def test_width_one_is_greedy() -> None:
    model, tokens = Model(2), ()
    for _ in range(5):
        tokens = (*tokens, model.top(tokens, 1).top[0][0])
    found, _ = search(model, 1, 5, 1.0, frozenset())
    assert found.best()[0].tokens == tokens


def test_log_probabilities_are_those_of_the_tokens_said() -> None:
    model = Model(3)
    beam: Beam = search(model, 2, 4, 1.0, frozenset())[0].best()[0]
    for at, (token, entry) in enumerate(zip(beam.tokens, beam.logprobs, strict=True)):
        assert entry.logprob == model(beam.tokens[:at])[token]
        assert entry.top[entry.rank - 1] == (token, entry.logprob)
