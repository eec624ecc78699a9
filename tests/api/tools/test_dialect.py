"""Which parsers a server takes: by flag, and by what a chat template shows. The templates are cut to what tells."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_runtime.api.tools.dialect import AS_OBJECTS, CallHistory, Dialect, call_history, choose_dialect
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.text.chat_template import ChatTemplate

LOOP = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}"
JSON = "{{ f.arguments | tojson }}"
HERMES = LOOP + '<tool_call>{"name": "{{ f.name }}", "arguments": ' + JSON + "}</tool_call>" + END
QWEN3 = HERMES + "{% if enable_thinking is false %}<think></think>{% endif %}"
QWEN_CODER = (
    LOOP
    + "<tool_call><function={{ f.name }}>{% for k, v in f.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>"
    + "{% endfor %}</function></tool_call>"
    + END
)
GLM = (
    LOOP
    + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    + "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call></think>"
    + END
)
LLAMA = (
    '<|start_header_id|>Answer with {"name": function name, "parameters": dictionary of argument name and its value}.'
    + LOOP
    + JSON
    + END
)
MISTRAL = LOOP + "[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON + END
MAGISTRAL = MISTRAL + "[THINK][/THINK]"
DEEPSEEK = (
    "{% for m in messages %}{% if m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    + "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}{% endfor %}{% else %}"
    + "{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
)
HARMONY = LOOP + "<|channel|>analysis<|channel|>commentary to=functions.{{ f.name }}<|message|>" + JSON + END
PYTHONIC = "[func_name1(params_name1=params_value1, …)]" + LOOP + JSON + END
GRANITE = (
    "<|start_of_role|>system<|end_of_role|>Answer with <|tool_call|> followed by a JSON list of tools used."
    + LOOP
    + '<|tool_call|>[{"name": "{{ f.name }}", "arguments": '
    + JSON
    + "}]"
    + END
)
GRANITE_THINKS = GRANITE + "Here is my thought process: … Here is my response:"
GRANITE4 = "<|start_of_role|>" + HERMES
PHI4_MINI = (
    "{% for m in messages %}{{ m.content }}{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}{% endfor %}"
)
NEMOTRON = (
    LOOP + '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": ' + JSON + "}]</TOOLCALL>" + END + "<think></think>"
)
COHERE = (
    LOOP
    + '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
    + JSON
    + "}]<|END_ACTION|>"
    + END
    + "<|START_THINKING|>{{ plan }}<|END_THINKING|>"
)
SEED = QWEN_CODER.replace("tool_call>", "seed:tool_call>") + "{% set begin = '<seed:think>' %}{{ begin }}</seed:think>"
OLMO3 = (
    "{% for m in messages %}{{ m.content }}{% if m.function_calls %}<function_calls>{{ m.function_calls }}"
    "</function_calls>{% endif %}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
)
MINICPM = (
    LOOP + "<|thought_start|>{{ m.thought }}<|thought_end|><|tool_call_start|>```python\n{{ f.name }}("
    "{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %})\n```<|tool_call_end|>" + END
)
MINIMAX = (
    LOOP
    + '<minimax:tool_call><invoke name="{{ f.name }}">{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
    + "{{ v }}</parameter>{% endfor %}</invoke></minimax:tool_call>"
    + END
    + "{{ messages[-1].content.split('</think>') | last }}"
)
INTERNLM = (
    LOOP + '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": ' + JSON + "}<|action_end|>" + END
)
EXAONE_DEEP = "{% for m in messages %}{{ m.content.split('</thought>')[-1] }}{% endfor %}"
TWO_FAMILIES = HERMES + "[TOOL_CALLS]"
PASTES = LOOP + "{{ f.arguments }}" + END


def chosen(source: str, **settings: Any) -> Dialect:
    return choose_dialect(ServerConfig(EngineConfig("m"), **settings), ChatTemplate({"default": source}, {}, "test"))


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        (HERMES, "hermes", ""),
        (QWEN3, "hermes", "qwen3"),
        (QWEN_CODER, "qwen3_coder", ""),
        (GLM, "glm45", "glm45"),
        (LLAMA, "llama3_json", ""),
        (MISTRAL, "mistral", ""),
        (MAGISTRAL, "mistral", "mistral"),
        (DEEPSEEK, "deepseek_v3", "deepseek_v3"),
        (HARMONY, "openai", "openai_gptoss"),
        (PYTHONIC, "pythonic", ""),
        (OLMO3, "olmo3", "qwen3"),
        (MINICPM, "minicpm", "minicpm"),
        (GRANITE, "granite", ""),
        (GRANITE_THINKS, "granite", "granite"),
        (GRANITE4, "hermes", ""),
        (PHI4_MINI, "phi4_mini_json", ""),
        (NEMOTRON, "nemotron_json", "qwen3"),
        (COHERE, "cohere", "cohere"),
        (SEED, "seed_oss", "seed_oss"),
        (MINIMAX, "minimax_m2", "qwen3"),
        (INTERNLM, "internlm", ""),
        (EXAONE_DEEP, "", "exaone_deep"),
        (TWO_FAMILIES, "", ""),
        (PASTES, "", ""),
        ("{{ messages }}", "", ""),
    ],
)
def test_a_template_shows_its_family(source: str, tools: str, reasoning: str) -> None:
    found = chosen(source)
    assert (found.tool_parser, found.reasoning_parser, found.auto_tools) == (tools, reasoning, bool(tools))


def test_flags_win_over_the_template() -> None:
    found = chosen(HERMES, tool_call_parser="llama3_json", reasoning_parser="deepseek_r1")
    assert (found.tool_parser, found.reasoning_parser) == ("llama3_json", "deepseek_r1")
    found = chosen(QWEN3, tool_call_parser="none", reasoning_parser="none")
    assert (found.tool_parser, found.reasoning_parser, found.auto_tools) == ("", "", False)
    assert not chosen(HERMES, enable_auto_tool_choice=False).auto_tools


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tool_call_parser": "hermez"}, "did you mean hermes?"),
        ({"reasoning_parser": "qwen"}, "did you mean qwen3?"),
        ({"enable_auto_tool_choice": True}, "give --tool-call-parser NAME, one of hermes"),
    ],
)
def test_what_cannot_be_stops_the_start(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(PASTES, **settings)
    assert says in error.value.message


THINKS = "{% for m in messages %}{{ m.content }}{{ m.thinking }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
THINKS_OR_SAYS = (
    "{% for m in messages %}{{ raise_exception('both') if m.content and m.thinking }}{% endfor %}" + THINKS
)


@pytest.mark.parametrize(
    ("source", "history"),
    [
        (HERMES, AS_OBJECTS),
        (GLM, AS_OBJECTS),
        (PASTES, CallHistory(argument_text=True)),
        (DEEPSEEK, CallHistory(argument_text=True, null_content=True)),
        ("{{ messages[0].content }}", AS_OBJECTS),
        (THINKS, CallHistory(thinking=True)),
        (THINKS_OR_SAYS, CallHistory(thinking=True, one_text=True)),
    ],
)
def test_how_a_template_wants_earlier_calls(source: str, history: CallHistory) -> None:
    assert call_history(ChatTemplate({"default": source}, {}, "test")) == history
