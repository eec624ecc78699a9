"""Chat templates: the extras that model makers use, what is refused, and equality with `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.text.llama_vocab import FOLDER

from stoker_runtime.errors import ConfigError, ModelError, RequestError
from stoker_runtime.text.chat_template import ChatTemplate, load_chat_template

MESSAGES = [{"role": "user", "content": 'He said "ä" & <b>'}, {"role": "assistant", "content": " ok "}]


def render(source: str, **arguments: object) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}, "test").render(MESSAGES, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages | length }}", "<s>2"),
        ("{{ messages[0].content | tojson }}", '"He said \\"ä\\" & <b>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=True) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ 'yes' if strftime_now('%Y') | int > 2000 }}", "yes"),
        ("{{ tools is none }} {{ documents is none }} {{ missing is defined }}", "True True False"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)
def test_extras(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[7].content.upper() }}", "no element 7"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails"),
    ],
)
def test_what_a_template_refuses_is_the_callers_fault(source: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(ModelError, match="'default', line 2 does not compile"):
        ChatTemplate({"default": "a\n{% if %}"}, {}, "test")


def test_no_template_tells_the_flag() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplate({}, {}, "test").render(MESSAGES)


def test_tools_take_the_template_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {}, "test")
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "f"


@pytest.mark.parametrize("prefill", ["A", "e", "n", "end", "]", "Assistant", "Answer: \n"])
def test_a_short_prefill_is_continued_where_it_stands(prefill: str) -> None:
    """What the template writes after the message holds the same letters."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}Assistant: Answer: \n end]"
    messages = [{"role": "user", "content": prefill}, {"role": "assistant", "content": prefill}]
    template = ChatTemplate({"default": source}, {}, "test")
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"[user]{prefill}[end]\n[assistant]{prefill}"
    trimming = ChatTemplate({"default": source.replace("m.content", "m.content | trim")}, {}, "test")
    text = trimming.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"[user]{prefill.strip()}[end]\n[assistant]{prefill.strip()}"


def test_continue_final_message_cuts_after_it() -> None:
    source = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert render(source, continue_final_message=True) == '<He said "ä" & <b>><ok'
    with pytest.raises(RequestError, match="continue_final_message"):
        render("{{ messages[0].role }}", continue_final_message=True)


def test_override_by_file_or_source(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("from file")
    own = {"default": "own"}
    assert load_chat_template("", own, {}, "m").render(MESSAGES) == "own"
    assert load_chat_template(str(file), own, {}, "m").render(MESSAGES) == "from file"
    assert load_chat_template("{{ 'inline' }}", own, {}, "m").render(MESSAGES) == "inline"
    with pytest.raises(ConfigError, match="no such file"):
        load_chat_template(str(tmp_path / "missing.jinja"), own, {}, "m")


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "whitespace": "{%- for m in messages %}\n  {%- if m.role == 'user' %}\n    [INST] {{ m.content }}\n  {%- endif %}\n"
    "{% endfor %}\n{# note #}\nend",
    "namespace": "{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True)[0][0]
    assert render(TEMPLATES[name]) == expected


CONVERSATION = [
    {"role": "user", "content": 'Hi "ä"'},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2+2?"},
]


def rendered_by_transformers(source: str, special: dict[str, str]) -> str | None:
    """What `transformers` renders; None when the template refuses the conversation there."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        return str(
            render_jinja_template([CONVERSATION], chat_template=source, add_generation_prompt=True, **special)[0][0]
        )
    except (jinja2.TemplateError, TypeError):
        return None


@pytest.mark.parametrize("part", range(4))
def test_real_templates_equal_transformers(part: int) -> None:
    files = sorted(FOLDER.glob("*.jinja"))[part::4]
    if not files:
        pytest.skip("llama.cpp's templates are not here: python tests/runtime/text/llama_vocab.py")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = 0
    for file in files:
        source = file.read_text(encoding="utf-8")
        expected = rendered_by_transformers(source, special)
        template = ChatTemplate({"default": source}, special, file.name)
        if expected is None:
            with pytest.raises(RequestError):
                template.render(CONVERSATION)
        else:
            assert template.render(CONVERSATION) == expected, file.name
            rendered += 1
    assert rendered >= 14
