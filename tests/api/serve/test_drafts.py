"""A server that verifies drafts beside one that does not: the same answers to whatever is asked, and what is accepted
is told in its metrics.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import CLIENT, wait_until
from prometheus_client.parser import text_string_to_metric_families
from server_process import FRESH, ServerProcess

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
PHRASE = "the red fox and the red hen "
NAME = "vllm:spec_decode_num"
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 120},
    "sampled": {"max_tokens": 60, "temperature": 0.7, "top_p": 0.8, "seed": 11},
    "choices": {"max_tokens": 60, "temperature": 0.4, "top_k": 3, "n": 3, "seed": 5},
    "penalties": {"max_tokens": 60, "presence_penalty": 0.1, "repetition_penalty": 1.02},
    "logprobs": {"max_tokens": 40, "logprobs": 3},
    "grammar": {"max_tokens": 40, "structured_outputs": {"regex": "(red |hen ){6}"}},
    "allowed": {"max_tokens": 50, "allowed_token_ids": [97, 98, 101]},
}

MASKED = ("grammar", "allowed")


def server(*flags: str) -> ServerProcess:
    sizes = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4")
    return ServerProcess(
        [sys.executable, "-m", "stoker_cli", "serve", "shape:tiny"], "--served-model-name", "tiny", *sizes, *flags
    )


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    found = server("--speculative-config", json.dumps(DRAFTS)), server()
    try:
        for each in found:
            assert wait_until(lambda each=each: "ready in" in each.log, 180), each.log
        yield found
    finally:
        for each in found:
            each.close()


def answer(to: ServerProcess, more: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": PHRASE * 6, "temperature": 0, "ignore_eos": True} | more
    found = CLIENT.post(f"{to.url}/v1/completions", json=body, headers=FRESH, timeout=120)
    assert found.status_code == 200, found.text
    return list(found.json()["choices"])


def near(first: Any, second: Any) -> bool:
    """Equal but for digits of log-probabilities beyond the fourth."""
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) < 1e-4
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(near(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(near, first, second))
    return bool(first == second)


def metrics(of: ServerProcess) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(CLIENT.get(f"{of.url}/metrics", headers=FRESH).text):
        for sample in family.samples:
            found[sample.name + (f" {place}" if (place := sample.labels.get("position")) else "")] += sample.value
    return found


def drafted(server: ServerProcess) -> float:
    """Tokens that were drafted so far."""
    return metrics(server)[f"{NAME}_draft_tokens_total"]


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_is_answered_as_without(both: tuple[ServerProcess, ServerProcess], name: str) -> None:
    drafting, plain = both
    before, expected = drafted(drafting), answer(plain, ASKED[name])
    for _ in range(1 if name in MASKED else 100):
        assert near(answer(drafting, ASKED[name]), expected)
        if drafted(drafting) > before:
            break  # where drafts seldom bring something, few steps have some
    if name in MASKED:
        assert drafted(drafting) == before, "rows whose next token the host has a say in have no drafts"
    else:
        assert drafted(drafting) > before, "none was ever drafted"


def test_a_stop_string_within_a_run_of_accepted_tokens(both: tuple[ServerProcess, ServerProcess]) -> None:
    drafting, plain = both
    text = answer(plain, {"max_tokens": 60})[0]["text"]
    stop = next(text[at : at + 3] for at in range(30, 50) if text[at : at + 3].isprintable())
    [got], [expected] = (answer(each, {"max_tokens": 60, "stop": [stop]}) for each in (drafting, plain))
    assert near(got, expected)
    assert got["finish_reason"] == "stop"
    assert got["text"] == text[: text.index(stop)]


def test_what_is_accepted_is_told(both: tuple[ServerProcess, ServerProcess]) -> None:
    drafting, plain = both
    before = metrics(drafting)

    def rises() -> bool:
        answer(drafting, ASKED["greedy"])
        return metrics(drafting)[f"{NAME}_drafts_total"] > before[f"{NAME}_drafts_total"]

    assert wait_until(rises, 60)
    after = metrics(drafting)
    drafts, tokens, accepted = (after[f"{NAME}_{each}_total"] for each in ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts <= tokens <= DRAFTS["num_speculative_tokens"] * drafts  # type: ignore[operator]
    assert 0 < accepted <= tokens
    places = [value for name, value in after.items() if name.startswith(f"{NAME}_accepted_tokens_per_pos_total ")]
    assert len(places) == DRAFTS["num_speculative_tokens"]
    assert sum(places) == accepted
    assert not any(name.startswith(NAME) for name in metrics(plain))


def series(of: ServerProcess, name: str) -> list[tuple[dict[str, str], float]]:
    """The labels and the value of each series of a metric."""
    families = text_string_to_metric_families(CLIENT.get(f"{of.url}/metrics", headers=FRESH).text)
    return [(dict(each.labels), each.value) for family in families for each in family.samples if each.name == name]


def test_what_a_rejected_draft_costs_is_told(both: tuple[ServerProcess, ServerProcess]) -> None:
    """Costs are timed by the server itself: what it assumes of one sequence becomes what it measured."""
    drafting, plain = both

    def measured() -> bool:
        answer(drafting, ASKED["greedy"])
        return any(labels["source"] == "measured" for labels, _ in series(drafting, "stoker:spec_decode_step_cost"))

    assert wait_until(measured, 120)
    costs = {
        int(labels["num_speculative_tokens"]): cost
        for labels, cost in series(drafting, "stoker:spec_decode_step_cost")
        if labels["batch_size"] == "1"
    }
    assert sorted(costs) == [1, 2, 3]
    assert all(0.1 < cost < 30 for cost in costs.values())
    gains = [gain for _, gain in series(drafting, "stoker:spec_decode_expected_tokens")]
    assert len(gains) == 3
    # What the second and the third draft add falls by the chance that one is accepted.
    chance = (gains[1] - gains[0]) / gains[0]
    assert 0 < chance < 1
    assert gains[2] - gains[1] == pytest.approx(chance * (gains[1] - gains[0]), rel=1e-6)
    assert gains[0] <= chance * (1 + 1e-6)
    [(_, spent)] = series(drafting, "stoker:spec_decode_cost_tokens_total")
    assert spent >= 0
    assert wait_until(lambda: re.search(r"drafts: .*, at the cost of \d+ tokens; \d+ tokens in all", drafting.log), 20)
    assert "stoker:spec_decode" not in CLIENT.get(f"{plain.url}/metrics", headers=FRESH).text
