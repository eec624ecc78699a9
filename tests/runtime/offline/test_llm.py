"""The Python interface over the uniform executor and the byte tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime import LLM, SamplingParams
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, EngineError, RequestError
from stoker_runtime.offline.options import engine_options
from stoker_runtime.request import FinishReason

CAPACITY = 256


def params(seed: int, max_tokens: int = 12, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **more)  # type: ignore[arg-type]


@pytest.fixture
def executor() -> UniformExecutor:
    # Every id is an ASCII byte of the byte tokenizer, and none of them ends a text.
    return UniformExecutor(vocab_size=128, num_pages=64, eos_token_ids=(999,))


@pytest.fixture
def llm(executor: UniformExecutor) -> LLM:
    return LLM.over(executor, EngineConfig(model="shape:uniform"))


def text_of(executor: UniformExecutor, prompt: tuple[int, ...], given: SamplingParams) -> str:
    return bytes(executor.expected_output(prompt, given, CAPACITY)).decode()


def test_generate_tokens_in_the_order_of_the_prompts(llm: LLM, executor: UniformExecutor) -> None:
    prompts = [(1, 2, 3), (7,), (5,) * 40]
    each = [params(seed) for seed in (11, 12, 13)]
    expected = [executor.expected_output(p, s, CAPACITY) for p, s in zip(prompts, each, strict=True)]
    assert llm.generate_tokens(prompts, each) == expected
    assert not llm.engine.has_work


def test_generate_more_prompts_than_a_server_would_queue(executor: UniformExecutor) -> None:
    llm = LLM.over(executor, EngineConfig(model="shape:uniform", max_queued=2))
    assert [len(each) for each in llm.generate_tokens([(i % 100,) for i in range(50)], params(1, 3))] == [3] * 50


def test_generate_text(llm: LLM, executor: UniformExecutor) -> None:
    outputs = llm.generate(["Hello", (72, 105)], [params(1, logprobs=0, prompt_logprobs=0), params(2)])
    assert outputs[0].prompt_token_ids == list(b"Hello")
    assert outputs[0].text == text_of(executor, tuple(b"Hello"), params(1))
    assert outputs[1].text == text_of(executor, (72, 105), params(2))
    first = outputs[0].outputs[0]
    assert first.logprobs is not None
    assert [entry[token].rank for token, entry in zip(first.token_ids, first.logprobs, strict=True)] == first.token_ids
    assert [entry[token].decoded_token for token, entry in zip(first.token_ids, first.logprobs, strict=True)] == list(
        first.text
    )
    assert first.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(first.token_ids, first.logprobs, strict=True))
    )
    assert outputs[0].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs[0] is None
    assert [list(entry) for entry in outputs[0].prompt_logprobs if entry] == [[token] for token in b"ello"]
    assert first.finish is FinishReason.LENGTH
    unasked = outputs[1]
    assert (unasked.prompt_logprobs, unasked.outputs[0].logprobs) == (None, None)
    assert unasked.outputs[0].cumulative_logprob is None


def test_one_prompt_of_text_or_ids(llm: LLM) -> None:
    assert llm.generate("Hi", params(3))[0].token_ids == llm.generate(tuple(b"Hi"), params(3))[0].token_ids


def test_stop_strings_end_the_text_before_them(llm: LLM, executor: UniformExecutor) -> None:
    whole = text_of(executor, (1, 2), params(4))
    stop = whole[4:6]
    [output] = llm.generate((1, 2), params(4), stop=[stop])
    assert output.text == whole[: whole.index(stop)]
    assert (output.outputs[0].finish, output.outputs[0].stop_reason) == (FinishReason.STOP, stop)
    assert len(output.token_ids) == whole.index(stop) + 2
    assert not llm.engine.has_work


def test_stop_ids_are_counted_but_not_text(llm: LLM, executor: UniformExecutor) -> None:
    expected = executor.expected_output((1, 2), params(5), CAPACITY)
    [output] = llm.generate((1, 2), params(5, stop_token_ids=(expected[3],)))
    at = expected.index(expected[3])
    assert output.token_ids == expected[: at + 1]
    assert output.text == bytes(expected[:at]).decode()
    assert (output.outputs[0].finish, output.outputs[0].stop_reason) == (FinishReason.STOP, expected[3])


def test_stream_gives_the_whole_text_in_parts(llm: LLM, executor: UniformExecutor) -> None:
    deltas = list(llm.generate_stream("Hello", params(6)))
    assert "".join(delta.text for delta in deltas) == text_of(executor, tuple(b"Hello"), params(6))
    assert sum(len(delta.token_ids) for delta in deltas) == 12
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish is FinishReason.LENGTH
    assert len(deltas) > 5


def test_stream_stops_at_a_stop_string(llm: LLM, executor: UniformExecutor) -> None:
    whole = text_of(executor, tuple(b"Hello"), params(6))
    deltas = list(llm.generate_stream("Hello", params(6), stop=[whole[5:7]]))
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(whole[5:7])]
    assert deltas[-1].stop_reason == whole[5:7]
    assert not llm.engine.has_work


def test_closing_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.generate_stream("Hello", params(6, 100))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    assert llm.engine.stats().pages_used == 0


def test_a_prompt_that_cannot_run_starts_none(llm: LLM, executor: UniformExecutor) -> None:
    with pytest.raises(RequestError):
        llm.generate_tokens([(1,), (1,) * 400], params(1))
    with pytest.raises(RequestError, match="2 prompts and 1 parameters"):
        llm.generate_tokens([(1,), (2,)], [params(1)])
    assert not llm.engine.has_work
    assert executor.batches == 0


def test_a_failing_step_raises_and_leaves_the_engine_idle(
    llm: LLM, executor: UniformExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = executor.execute

    def fail(batch: object) -> object:
        executor.batches += 1
        executor.sampled = executor.batches
        executor.unread.clear()
        raise EngineError("one step went wrong")

    monkeypatch.setattr(executor, "execute", fail)
    with pytest.raises(EngineError, match="one step went wrong"):
        llm.generate_tokens([(1, 2)] * 20, params(1))
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    monkeypatch.setattr(executor, "execute", execute)
    assert len(llm.generate_tokens([(1, 2)], params(1))[0]) == 12


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"max_modellen.*did you mean 'max_model_len'"):
        LLM("shape:uniform", max_modellen=4)


def test_progress_is_one_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([(1,), (2,)], params(1), use_tqdm=True)
    assert "2/2 sequences, 24 tokens" in capsys.readouterr().err


def test_choices_stops_and_outputs_under_vllms_names(llm: LLM, executor: UniformExecutor) -> None:
    whole = text_of(executor, (1, 2), params(4))
    [output] = llm.generate([(1, 2)], [params(4, n=3, stop=whole[4:6])])
    first = output.outputs[0]
    assert (first.text, first.finish_reason, first.stop_reason) == (
        whole[: whole.index(whole[4:6])],
        "stop",
        whole[4:6],
    )
    assert [each.index for each in output.outputs] == [0, 1, 2]
    seeds = [executor.expected_output((1, 2), params(seed), CAPACITY) for seed in (5, 6)]
    for each, expected in zip(output.outputs[1:], seeds, strict=True):
        assert list(each.token_ids) == expected[: len(each.token_ids)]
    assert (output.prompt, output.finished, output.num_cached_tokens) == (None, True, 0)
    kept = llm.generate((1, 2), params(4, stop=[whole[4:6]], include_stop_str_in_output=True))[0]
    assert kept.text == first.text + whole[4:6]
    assert not llm.engine.has_work


def test_prompts_as_mappings_and_answers_without_text(llm: LLM) -> None:
    given: list[dict[str, object]] = [{"prompt": "Hello"}, {"prompt_token_ids": list(b"Hello")}]
    as_text, as_ids = llm.generate(given, params(3, detokenize=False))  # type: ignore[arg-type]
    assert (as_text.prompt, as_ids.prompt) == ("Hello", None)
    assert as_text.token_ids == as_ids.token_ids
    assert as_text.text == ""
    assert len(as_text.token_ids) == 12
    for bad in ({}, {"promt": "x"}):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(bad, params(1))


def test_no_limit_means_as_many_as_fit(llm: LLM) -> None:
    [output] = llm.generate([(1, 2, 3)], params(1, max_tokens=None, temperature=0.0))
    assert len(output.token_ids) == llm.engine.scheduler.config.max_tokens - 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"n": 0}, "n must be"), ({"stop": ""}, "empty string"), ({"stop": "x", "detokenize": False}, "needs detokenize")],
)
def test_parameters_that_cannot_be(llm: LLM, settings: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate((1, 2), params(1, **settings))
    assert not llm.engine.has_work


def test_parameters_become_the_engines() -> None:
    given = SamplingParams(logit_bias={5: 200.0}, stop_token_ids=[1, 2], top_k=-1, bad_words=[(3, 4)], max_tokens=None)
    found = given.resolve(7, pytest.fail)  # type: ignore[arg-type]
    assert (found.logit_bias, found.stop_token_ids, found.top_k) == (((5, 100.0),), (1, 2), 0)
    assert (found.bad_words, found.max_tokens) == (((3, 4),), 7)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}, "must name an EAGLE-3 head"),
        ({"max_modl_len": 5}, "did you mean 'max_model_len'"),
        ({"task": "transcription"}, "task='transcription'"),
        ({"max_logprobs": 50}, "between 0 and 20"),
        ({"generation_config": "somewhere"}, "auto, vllm or none"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("shape:tiny", **options)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("attention_backend", "banana", "AUTO, CPU_ATTN"),
        ("trust_remote_code", "banana", "true or false"),
        ("structured_outputs_config", {"disable_any_whitespace": True}, "that field of their structured_outputs"),
        ("media_io_kwargs", {"banana": {}}, "unknown key 'banana'"),
        ("enable_chunked_prefill", False, "always computed in chunks"),
        ("worker_cls", "mine.Worker", "can only be auto"),
        ("enable_prompt_embeds", True, "prompts are texts or token ids"),
    ],
)
def test_options_that_only_say_how_are_checked_as_flags(option: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as wrong:
        engine_options({option: value})
    assert option in wrong.value.message


def test_an_ignored_option_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    given = {"cudagraph_capture_sizes": [2, 7], "media_io_kwargs": {"image": {}}, "model_impl": None}
    assert engine_options(given) == {}
    assert [each.getMessage().split(" is ignored: ")[0] for each in caplog.records] == [
        "cudagraph_capture_sizes 2 7", 'media_io_kwargs {"image": {}}'
    ]  # fmt: skip


def test_options_under_vllms_names() -> None:
    given = {"block_size": 32, "tensor_parallel_size": 1, "trust_remote_code": True, "max_model_len": None, "seed": 4}
    assert engine_options(given) == {"page_size": 32, "tensor_parallel_size": 1, "seed": 4}
    assert engine_options({"dtype": torch.float16, "task": "embed", "compilation_config": 3}) == {
        "dtype": "float16",
        "runner": "pooling",
    }
    assert engine_options({"dtype": "half", "pooler_config": {"normalize": False}, "convert": None}) == {
        "dtype": "float16",
        "pooler_config": '{"normalize": false}',
        "runner": "auto",
    }


def test_a_models_own_defaults(tmp_path: Path, executor: UniformExecutor) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}')
    llm = LLM.over(executor, EngineConfig(model=str(tmp_path), tokenizer="shape:uniform"))
    found = llm.get_default_sampling_params()
    assert (found.temperature, found.top_k, found.max_tokens) == (0.25, 7, 3)
    assert len(llm.generate([(1, 2)])[0].token_ids) == 3
    llm._own_defaults = False
    assert llm.get_default_sampling_params() == SamplingParams()
