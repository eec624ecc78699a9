"""POST /v1/completions against the OpenAI and vLLM behaviour, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_server import Running, stream
from fake_engine import EOS, SPOKEN, bytes_of


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": "byte-model", "prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_shape_of_a_whole_answer(http: httpx.Client) -> None:
    answer = complete(http, max_tokens=9)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "byte-model"
    assert answer["choices"] == [
        {"index": 0, "text": SPOKEN[:9], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 9,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_max_tokens_is_16_unless_given_and_all_that_is_left_when_null(http: httpx.Client) -> None:
    assert complete(http)["usage"]["completion_tokens"] == 16
    assert complete(http, max_tokens=None)["usage"]["completion_tokens"] == 254


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_prompt_forms(server: Running, http: httpx.Client, prompt: Any, sent: list[tuple[int, ...]]) -> None:
    answer = complete(http, prompt=prompt)
    assert [request.prompt_token_ids for request in server.engine.requests] == sent
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))


def test_choice_index_is_prompt_times_n_plus_choice_and_seeds_differ(server: Running, http: httpx.Client) -> None:
    server.engine.script = lambda request: [request.prompt_token_ids[0], 48 + (request.params.seed or 0)]
    answer = complete(http, prompt=["a", "b"], n=2, seed=5, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "a5"),
        (1, "a6"),
        (2, "b5"),
        (3, "b6"),
    ]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 8


def test_stream_put_together_equals_the_whole(server: Running, http: httpx.Client) -> None:
    server.engine.script = lambda _: [*"naïve 日本 🙂 text".encode(), EOS]
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 64}
    whole = {choice["index"]: choice for choice in complete(http, **body)["choices"]}
    texts = dict.fromkeys(whole, "")
    finishes: dict[int, list[str]] = {index: [] for index in whole}
    for event in stream(http, **body):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == {index: choice["text"] for index, choice in whole.items()}
    assert texts[0] == "naïve 日本 🙂 text"
    assert set(map(tuple, finishes.values())) == {("stop",)}


def test_stream_usage(http: httpx.Client) -> None:
    events = stream(http, prompt="hi", max_tokens=3, stream_options={"include_usage": True})
    assert [event["choices"] == [] for event in events] == [False, False, False, True]
    assert [event["usage"] for event in events[:-1]] == [None, None, None]
    assert events[-1]["usage"]["completion_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(http, prompt="hi", max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert all("usage" not in event for event in stream(http, prompt="hi", max_tokens=3))


@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize(("include", "text"), [(False, "The quick "), (True, "The quick brown")])
def test_stop_string_across_tokens(server: Running, http: httpx.Client, group: int, include: bool, text: str) -> None:
    server.engine.group = group
    server.engine.delay = 0.001
    body = {"max_tokens": 100, "stop": ["zebra", "brown"], "include_stop_str_in_output": include}
    answer = complete(http, **body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "brown")
    assert answer["usage"]["completion_tokens"] == len("The quick brown")
    events = stream(http, prompt="hi", **body)
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert events[-1]["choices"][0]["stop_reason"] == "brown"
    assert len(server.engine.aborted) == 2


@pytest.mark.parametrize("group", [1, 2, 4, 5])
@pytest.mark.parametrize(("include", "text"), [(False, "à "), (True, "à 日本")])
def test_stop_string_of_several_bytes_a_character(
    server: Running, http: httpx.Client, group: int, include: bool, text: str
) -> None:
    server.engine.group = group
    server.engine.script = lambda _: [*"à 日本語 🙂".encode(), EOS]
    body = {"max_tokens": 64, "stop": ["日本", "🙃"], "include_stop_str_in_output": include}
    choice = complete(http, **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "日本")
    events = stream(http, prompt="hi", **body)
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert events[-1]["choices"][0]["stop_reason"] == "日本"


def test_fields_that_choose_tokens_reach_the_engine(server: Running, http: httpx.Client) -> None:
    fields = {"top_k": 7, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.4, "repetition_penalty": 1.5, "min_tokens": 1}
    fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "temperature": 0.25, "seed": 9, "ignore_eos": True}
    complete(http, **fields, allowed_token_ids=[84, 104], bad_words=["ox", " x"], logit_bias={"84": 5})
    params = server.engine.requests[-1].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.allowed_token_ids == (84, 104)
    assert params.bad_words == (tuple(b"ox"), tuple(b" ox"), tuple(b"x"), tuple(b" x"))
    assert params.logit_bias == ((84, 5.0),)
    complete(http)
    params = server.engine.requests[-1].params
    assert (params.bad_words, params.allowed_token_ids, params.typical_p, params.masked) == ((), (), 1.0, False)


def test_stop_token_and_eos_leave_no_text(server: Running, http: httpx.Client) -> None:
    server.engine.script = lambda _: [104, 105, 10, 33]
    choice = complete(http, stop_token_ids=[10])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hi", "stop", 10)
    choice = complete(http, stop_token_ids=[10], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "hi\n"
    server.engine.script = lambda _: [104, 105, EOS]
    choice = complete(http)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hi", "stop", None)


def test_min_tokens_puts_off_stop_strings(http: httpx.Client) -> None:
    assert complete(http, stop="quick", min_tokens=12, max_tokens=20)["choices"][0]["text"] == SPOKEN[:20]
    assert complete(http, stop="o", min_tokens=14, max_tokens=40)["choices"][0]["text"] == "The quick brown f"


def test_a_session_reaches_the_engine(server: Running, http: httpx.Client) -> None:
    complete(http, session_id="talk", max_tokens=1)
    assert server.engine.requests[-1].session == "talk"


def test_echo(http: httpx.Client) -> None:
    assert complete(http, echo=True, max_tokens=3)["choices"][0]["text"] == "hiThe"
    assert complete(http, prompt=[104, 105], echo=True, max_tokens=3)["choices"][0]["text"] == "hiThe"
    events = stream(http, prompt="hi", echo=True, max_tokens=3)
    assert "".join(event["choices"][0]["text"] for event in events) == "hiThe"
    answer = complete(http, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs(http: httpx.Client) -> None:
    found = complete(http, logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert found == {
        "text_offset": [0, 1],
        "tokens": ["T", "h"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"T": -0.5, "U": -1.5}, {"h": -0.5, "i": -1.5}],
    }
    found = complete(http, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"T": -0.5}]
    found = complete(http, logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:84"]


def test_echo_with_logprobs_as_evaluation_harnesses_ask(http: httpx.Client) -> None:
    body = {"prompt": [[104, 105, 33]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
    found = complete(http, **body)["choices"][0]["logprobs"]
    assert found["tokens"] == ["h", "i", "!", "T"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 2, 3]
    alone = complete(http, **{**body, "max_tokens": 0})["choices"][0]
    assert alone["logprobs"]["tokens"] == ["h", "i", "!"]
    parts = [event["choices"][0]["logprobs"] for event in stream(http, **body)]
    for key in ("tokens", "text_offset"):
        assert [entry for part in parts for entry in part[key]] == found[key]


def test_prompt_logprobs(http: httpx.Client) -> None:
    choice = complete(http, prompt="abc", prompt_logprobs=1, max_tokens=1)["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}},
    ]


def test_token_ids_on_request(http: httpx.Client) -> None:
    choice = complete(http, return_token_ids=True, max_tokens=3)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([104, 105], bytes_of("The"))
    events = [event["choices"][0] for event in stream(http, prompt="hi", return_token_ids=True, max_tokens=3)]
    assert events[0]["prompt_token_ids"] == [104, 105]
    assert [token for event in events for token in event["token_ids"]] == bytes_of("The")


def test_truncate_prompt_tokens_keeps_the_end(server: Running, http: httpx.Client) -> None:
    complete(http, prompt="abcdef", truncate_prompt_tokens=2)
    complete(http, prompt="a" * 400, truncate_prompt_tokens=-1, max_tokens=6)
    assert [len(request.prompt_token_ids) for request in server.engine.requests] == [2, 250]
    assert server.engine.requests[0].prompt_token_ids == tuple(b"ef")


def test_sampling_fields_reach_the_engine(server: Running, http: httpx.Client) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "seed": 42,
        "ignore_eos": True,
        "min_tokens": 2,
    }
    complete(http, **fields, logit_bias={"7": 500, "8": -1}, user="somebody", cache_salt="tenant")
    request = server.engine.requests[0]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.params.logit_bias == ((7, 100.0), (8, -1.0))
    assert request.cache_salt == "tenant"


def test_top_k_of_the_whole_vocabulary_is_no_filter(server: Running, http: httpx.Client) -> None:
    for top_k in (-1, 0, 512, 10**12):
        complete(http, top_k=top_k)
    assert [request.params.top_k for request in server.engine.requests] == [0, 0, 0, 0]


def test_line_separators_do_not_cut_events(server: Running, http: httpx.Client) -> None:
    spoken = "a\u2028b\u2029c\u0085d\r\ne"
    server.engine.script = lambda _: [*spoken.encode(), EOS]
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 50}) as response:
        lines = [line for line in response.iter_lines() if line and line != "data: [DONE]"]
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(texts) == spoken
