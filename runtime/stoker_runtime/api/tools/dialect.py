"""How a model writes calls and reasoning: chosen by flag, else from its chat template where that is unmistakable.

A template shows how the model was taught to call: it spells earlier calls out, in words and markers that one family
uses. Invariants: a template that shows no family, or more than one, chooses none; the operator's word always wins.
Knows nothing of requests.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from stoker_runtime.api.tools.history import AS_OBJECTS, CallHistory, call_history
from stoker_runtime.api.tools.parsers import TOOL_PARSERS
from stoker_runtime.api.tools.reasoning import HARMONY, REASONING_PARSERS
from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.text.chat_template import ChatTemplate

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is known of a model's ways; "" where nothing is.

    `auto_tools`: whether a model may call on its own.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    auto_tools: bool = False
    history: CallHistory = AS_OBJECTS


@dataclass(frozen=True, slots=True)
class Sign:
    """A family shows when all of `present` stand in a template and none of `absent`."""

    parser: str
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()


TOOL_SIGNS = (
    Sign("openai", ("<|channel|>", "<|message|>", "functions.")),
    Sign("glm4", ("# 可用工具", "metadata"), ("<arg_key>",)),
    Sign("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    Sign("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    Sign(
        "hermes",
        ("<tool_call>", "</tool_call>", "arguments"),
        ("<arg_key>", "<function=", "<invoke", "<tool_sep>", "<tool_calls>"),
    ),
    Sign("mistral", ("[TOOL_CALLS]",)),
    Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    Sign("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    Sign(
        "llama3_json",
        ("<|start_header_id|>", '"parameters": dictionary of argument name'),
        ("<function=", "<tool_call>"),
    ),
    Sign("granite", ("<|tool_call|>", "<|start_of_role|>"), ("<tool_call>",)),
    Sign("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    Sign("nemotron_json", ("<TOOLCALL>", "</TOOLCALL>")),
    Sign("cohere", ("<|START_ACTION|>", "<|END_ACTION|>", "tool_name")),
    Sign("command_r", ("Action:", "```json", "tool_name", "<|CHATBOT_TOKEN|>"), ("<|START_ACTION|>",)),
    Sign("internlm", ("<|action_start|>", "<|plugin|>")),
    Sign("seed_oss", ("<seed:tool_call>", "<function=", "<parameter=")),
    Sign("minimax_m2", ("<minimax:tool_call>", "<invoke name=", "<parameter name=")),
    Sign("olmo3", ("<function_calls>", "</function_calls>"), ("<invoke",)),
    Sign("minicpm", ("<|tool_call_start|>", "```python")),
    Sign("pythonic", ("[func_name1(params_name1=params_value1",)),
)
REASONING_SIGNS = (
    Sign(HARMONY, ("<|channel|>", "<|message|>", "analysis")),
    Sign("mistral", ("[THINK]", "[/THINK]")),
    Sign("granite", ("Here is my thought process:", "Here is my response:")),
    Sign("granite3_3", ("</think>", "<response></response>")),
    Sign("cohere", ("<|START_THINKING|>", "<|END_THINKING|>")),
    Sign("seed_oss", ("<seed:think>",)),
    Sign("exaone_deep", ("</thought>",)),
    Sign("minicpm", ("<|thought_start|>", "<|thought_end|>")),
    Sign("glm45", ("</think>", "<arg_key>")),
    Sign("deepseek_v3", ("</think>", "<｜Assistant｜>"), ("<arg_key>",)),
    Sign("qwen3", ("</think>",), ("<arg_key>", "<｜Assistant｜>", "[THINK]", "<response></response>")),
)


def detect(source: str, signs: Collection[Sign]) -> str:
    """The one family that shows in the template `source`; "" for none or several."""
    found = {
        sign.parser
        for sign in signs
        if all(mark in source for mark in sign.present) and not any(mark in source for mark in sign.absent)
    }
    return found.pop() if len(found) == 1 else ""


def choose_dialect(config: ServerConfig, template: ChatTemplate) -> Dialect:
    """The dialect of a server. Raises ConfigError for an unknown parser, and for automatic calls that none can read."""
    source = template.source
    tools = _choose("tool_call_parser", config.tool_call_parser, TOOL_PARSERS, detect(source, TOOL_SIGNS))
    reasoning = _choose("reasoning_parser", config.reasoning_parser, REASONING_PARSERS, detect(source, REASONING_SIGNS))
    wanted = config.enable_auto_tool_choice
    if wanted and not tools:
        raise ConfigError(
            "enable_auto_tool_choice needs a parser, and the chat template shows none; give --tool-call-parser NAME, "
            f"one of {', '.join(TOOL_PARSERS)}.",
            param="tool_call_parser",
        )
    return Dialect(tools, reasoning, bool(tools) and wanted is not False, call_history(template))


def _choose(key: str, asked: str, known: Collection[str], detected: str) -> str:
    if asked == AUTO:
        return detected
    if asked == NONE:
        return ""
    if asked not in known:
        near = difflib.get_close_matches(asked, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        allowed = ", ".join((AUTO, NONE, *known))
        raise ConfigError(f"{key} is {asked!r}; it must be one of {allowed}{hint}.", param=key)
    return asked
