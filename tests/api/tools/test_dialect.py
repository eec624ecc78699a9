"""Which parsers a server takes: by flag, and by what a chat template shows."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import (
    COHERE,
    COMMAND_R,
    DEEPSEEK,
    EXAONE_DEEP,
    GLM,
    GLM4,
    GLM4_OF_2024,
    GRANITE,
    GRANITE4,
    GRANITE_THINKS,
    HARMONY,
    HERMES,
    INTERNLM,
    LLAMA,
    MAGISTRAL,
    MINICPM,
    MINIMAX,
    MISTRAL,
    NEMOTRON,
    OLMO3,
    PASTES,
    PHI4_MINI,
    PYTHONIC,
    QWEN3,
    QWEN_CODER,
    SEED,
    TWO_FAMILIES,
)

from stoker_runtime.api.tools.dialect import Dialect, choose_dialect
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.text.chat_template import ChatTemplate


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
        (GLM4, "glm4", "qwen3"),
        (GLM4_OF_2024, "glm4", ""),
        (COMMAND_R, "command_r", ""),
        (COMMAND_R + COHERE, "cohere", "cohere"),
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
