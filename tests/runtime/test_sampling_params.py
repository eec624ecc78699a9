"""The parameters of the offline interface that become constraints, prompts that are cut, scripts' tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.runtime.engine.uniform_executor import UniformExecutor

from stoker_runtime import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint, ConstraintKind
from stoker_runtime.sampling.grammar import closed
from stoker_runtime.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
)


@pytest.fixture
def llm() -> LLM:
    return LLM.over(UniformExecutor(vocab_size=128, num_pages=64, eos_token_ids=(999,)), EngineConfig("shape:uniform"))


def constraint(**fields: Any) -> Constraint:
    found = SamplingParams(**fields).resolve(10, Tokenizer.synthetic).constraint
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_each_way_to_ask(name: str) -> None:
    kind = StructuredOutputsParams if name == "structured_outputs" else GuidedDecodingParams
    ask = lambda **fields: constraint(**{name: kind(**fields)})  # noqa: E731
    assert ask(regex="a+") == Constraint(ConstraintKind.REGEX, "a+")
    assert ask(json='{"type": "integer"}') == ask(json={"type": "integer"})
    one_line = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    assert json.loads(ask(json_object=True).text) == {"type": "object", "x-guidance": one_line}
    assert ask(choice=["a", "b"]).kind is ConstraintKind.JSON_SCHEMA or "a" in ask(choice=["a", "b"]).text
    assert ask(grammar="start: /a/").kind is ConstraintKind.GRAMMAR
    bare = json.loads(ask(json={"type": "object"}, disable_any_whitespace=True).text)["x-guidance"]
    assert bare == {"whitespace_flexible": False}, "no separator with a space"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": StructuredOutputsParams()}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputsParams(regex="a", choice=["a"])}, "structured_outputs.choice"),
        ({"guided_decoding": GuidedDecodingParams(json="{")}, "guided_decoding.json"),
        ({"structured_outputs": StructuredOutputsParams(json={"a": {1}})}, "structured_outputs"),  # type: ignore[dict-item]
        (
            {
                "structured_outputs": StructuredOutputsParams(regex="a"),
                "guided_decoding": GuidedDecodingParams(regex="a"),
            },
            "guided_decoding",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_asked(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([(1, 2)], SamplingParams(**fields))
    assert caught.value.param == param
    assert not llm.engine.has_work


def test_open_objects_are_closed_and_values_are_not() -> None:
    open_object = {"type": "object", "properties": {"a": {"type": "object"}}, "enum": [{"type": "object"}]}
    found = closed({"anyOf": [open_object, {"type": "object", "additionalProperties": True}]})
    first, second = found["anyOf"]
    assert first["additionalProperties"] is first["properties"]["a"]["additionalProperties"] is False
    assert first["enum"] == [{"type": "object"}]
    assert second["additionalProperties"] is True


def test_prompts_are_cut_to_their_end(llm: LLM) -> None:
    cut = llm.generate([range(1, 20)], SamplingParams(max_tokens=2, truncate_prompt_tokens=3))[0]
    assert cut.prompt_token_ids == [17, 18, 19]
    longest = llm.engine.scheduler.config.max_tokens
    most = llm.generate([[1] * 1000], SamplingParams(max_tokens=2, truncate_prompt_tokens=-1))[0]
    assert (len(most.prompt_token_ids), len(most.token_ids)) == (longest - 2, 2)


def test_priorities(llm: LLM) -> None:
    with pytest.raises(RequestError, match="scheduling_policy='priority'"):
        llm.generate([(1,), (2,)], SamplingParams(max_tokens=1), priority=[1, 0])
    with pytest.raises(RequestError, match="2 prompts and 1 priorities"):
        llm.generate([(1,), (2,)], SamplingParams(max_tokens=1), priority=[0])
    config = EngineConfig("shape:uniform", scheduling_policy="priority", max_num_seqs=1)
    ranked = LLM.over(UniformExecutor(vocab_size=128, num_pages=64, max_num_seqs=1, eos_token_ids=(999,)), config)
    ended: list[str] = []
    add = ranked.engine.add
    ranked.engine.add = lambda request, **more: ended.append(request.priority) or add(request, **more)  # type: ignore
    assert len(ranked.generate([(1,), (2,)], SamplingParams(max_tokens=1), priority=[5, -1])) == 2
    assert ended == [5, -1]


def test_the_tokenizer_of_scripts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer("ab") == {"input_ids": [97, 98], "attention_mask": [1, 1]}
    assert tokenizer(["a", "bc"])["input_ids"] == [[97], [98, 99]]
    assert tokenizer.batch_decode([[97], [98]]) == ["a", "b"]
    assert tokenizer.decode(97) == "a"
    assert tokenizer.convert_tokens_to_ids(["a", "no such"]) == [97, None]
    assert tokenizer.convert_ids_to_tokens([97]) == tokenizer.tokenize("a") == ["a"]
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    assert text == "<user>hi<me>"
    assert tokenizer.apply_chat_template(messages, chat_template=TEMPLATE) == list(b"<user>hi")
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template) == (256, None, None)
    with pytest.raises(RequestError, match="return_tensors"):
        tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, return_tensors="pt")
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        tokenizer.apply_chat_template([{"role": "user", "contnt": "hi"}], chat_template=TEMPLATE)
