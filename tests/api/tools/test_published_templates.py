"""What models' own templates show, as they are published: those that llama.cpp ships, and a folder of `ORG/NAME/` with
`tokenizer_config.json` or `chat_template.jinja`, as hubs have them, which STOKER_PUBLISHED_TEMPLATES names. They are
their makers': none is here.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.text.llama_vocab import FOLDER

from stoker_runtime.api.tools.dialect import choose_dialect
from stoker_runtime.api.tools.history import turns_of, with_tools
from stoker_runtime.api.tools.parsers import TOOL_PARSERS
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.text.chat_template import ChatTemplate

NAMED = os.environ.get("STOKER_PUBLISHED_TEMPLATES", "")
FAMILIES: dict[str, tuple[str, str]] = {
    r"Qwen/Qwen2\.5-[\d.]+B-Instruct": ("hermes", ""),
    r"Qwen/Qwen3-[\d.]+B": ("hermes", "qwen3"),
    r"Qwen/Qwen3-Coder.*": ("qwen3_coder", ""),
    r"Qwen/Qwen3\.5-.*": ("qwen3_coder", "qwen3"),
    r"NousResearch/Hermes-(2-Pro|3).*": ("hermes", ""),
    r"HuggingFaceTB/SmolLM3.*": ("hermes", "qwen3"),
    r"meta-llama/Llama-3\.[12]-.*(Instruct)": ("llama3_json", ""),
    r"mistralai/Mistral-(7B-Instruct-v0\.3|Nemo|Small-3).*": ("mistral", ""),
    r"mistralai/Magistral.*": ("mistral", "mistral"),
    r"deepseek-ai/DeepSeek-(R1(-\d+)?|V3\.1)": ("deepseek_v3", "deepseek_v3"),
    r"deepseek-ai/DeepSeek-V3(-\d+)?": ("deepseek_v3", ""),
    r"zai-org/GLM-[45]\.\d+.*": ("glm45", "glm45"),
    r"openai/gpt-oss.*": ("openai", "openai_gptoss"),
    r"CohereLabs/.*(command-a|command-r7b).*": ("cohere", "cohere"),
    r"CohereLabs/c4ai-command-r-(v01|plus|08-2024|plus-08-2024)": ("command_r", ""),
    r"(zai-org|THUDM)/GLM-(4|Z1)-\d+B-0414": ("glm4", "qwen3"),
    r"(zai-org|THUDM)/glm-4-9b-chat.*": ("glm4", ""),
    r"openbmb/MiniCPM3.*": ("minicpm", "minicpm"),
    r"ByteDance-Seed/Seed-OSS.*": ("seed_oss", "seed_oss"),
    r"nvidia/NVIDIA-Nemotron-Nano.*v2": ("nemotron_json", "qwen3"),
    r"ibm-granite/granite-3\.[01].*": ("granite", ""),
    r"ibm-granite/granite-3\.2.*": ("granite", "granite"),
    r"MiniMaxAI/MiniMax-M2.*": ("minimax_m2", "qwen3"),
    r"LGAI-EXAONE/EXAONE-Deep.*": ("", "exaone_deep"),
    r"microsoft/Phi-4-mini-instruct": ("phi4_mini_json", ""),
    # Which were taught no calls.
    r"(HuggingFaceH4/zephyr|mistralai/Mixtral|deepseek-ai/deepseek-llm|openchat/|Qwen/Qwen1\.5).*": ("", ""),
}


def published(folder: Path) -> ChatTemplate:
    alone = folder / "chat_template.jinja"
    said = json.loads((folder / "tokenizer_config.json").read_text()) if not alone.exists() else {}
    source = alone.read_text() if alone.exists() else said["chat_template"]
    named = {each["name"]: each["template"] for each in source} if isinstance(source, list) else {"default": source}
    return ChatTemplate(named, {"bos_token": "<s>", "eos_token": "</s>"}, folder.name)


@pytest.mark.skipif(not NAMED, reason="STOKER_PUBLISHED_TEMPLATES names no folder of published templates")
def test_a_published_template_shows_its_family() -> None:
    seen = set()
    for folder in sorted(Path(NAMED).glob("*/*")):
        name = f"{folder.parent.name}/{folder.name}"
        family = next((pattern for pattern in FAMILIES if re.fullmatch(pattern, name)), None)
        if family is not None:
            found = choose_dialect(ServerConfig(EngineConfig("m")), published(folder))
            assert (found.tool_parser, found.reasoning_parser) == FAMILIES[family], name
            if found.tool_parser in ("glm4", "command_r"):
                read_back(published(folder))
            seen.add(family)
    assert len(seen) > 3, f"{NAMED} has templates of {sorted(seen)} alone"


SHIPPED: dict[str, tuple[str, str]] = {
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", ""),
    "Cohere2MoE": ("cohere", "cohere"),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm45", "glm45"),
    "Kimi-K2-Instruct": ("kimi_k2", ""),
    "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
    "moonshotai-Kimi-K2": ("kimi_k2", ""),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", ""),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", ""),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ""),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", ""),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "deepseek_v3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_v3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", "deepseek_v3"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite3_3"),
    "ibm-granite-granite-4.0": ("hermes", ""),
    "ibm-granite-granite-4.1": ("hermes", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", ""),
    # Calls as no parser reads them; none at all.
    "unsloth-Apriel-1.5": ("", ""),
    "google-gemma-2-2b-it": ("", ""),
    "microsoft-Phi-3.5-mini-instruct": ("", ""),
}
TELLS_NO_CALL = ("ibm-granite-granite-3.3-2B-Instruct", "Kimi-K2-Instruct", "Kimi-K2-Thinking")
"""The first says in words how to call, and leaves earlier calls out; the others change a list, which neither
transformers nor we let a template do.
"""
RESULT = "seventeen degrees"


def shipped(name: str) -> ChatTemplate:
    if not FOLDER.is_dir():
        pytest.skip("llama.cpp's templates are not here: python tests/runtime/text/llama_vocab.py")
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, name)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_template_that_llama_cpp_ships_shows_its_family(name: str) -> None:
    found = choose_dialect(ServerConfig(EngineConfig("m")), shipped(name))
    assert (found.tool_parser, found.reasoning_parser) == SHIPPED[name]


@pytest.mark.parametrize("name", [name for name, (tools, _) in SHIPPED.items() if tools and name not in TELLS_NO_CALL])
def test_a_call_is_read_as_its_own_template_spells_it(name: str) -> None:
    """What the model would have written is what its template makes of a call in a conversation."""
    read_back(shipped(name))


def read_back(template: ChatTemplate) -> None:
    """Assert that a call in a conversation is read back from what `template` makes of it."""
    rng = random.Random()
    dialect = choose_dialect(ServerConfig(EngineConfig("m")), template)
    city = rng.choice(["Bad Tölz", "São Paulo", "a b"])
    arguments = {"city": city, "days": rng.randrange(2, 90), "near": {"km": [rng.random()]}}
    near = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}}
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "near": near}
    # Command R+'s template refuses a parameter without a description, and an object that does not say what it holds.
    schema = {"type": "object", "properties": {name: {**of, "description": "it"} for name, of in properties.items()}}
    tool = {"type": "function", "function": {"name": "get_weather", "description": "says it", "parameters": schema}}
    given: Any = json.dumps(arguments) if dialect.history.argument_text else arguments
    # Mistral's take nine letters, Kimi's what it writes itself.
    identity = "functions.get_weather:0" if dialect.tool_parser == "kimi_k2" else "abc123DEF"
    call = {"id": identity, "type": "function", "function": {"name": "get_weather", "arguments": given}}
    asked = {"role": "user", "content": "How is it?"}
    messages = [
        asked,
        {"role": "assistant", "content": None if dialect.history.null_content else "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "name": "get_weather", "content": RESULT},
    ]
    if dialect.history.as_turns:
        messages = [turn for message in messages for turn in turns_of(message)]
    shown = [asked], messages
    if dialect.history.tools_in_message:
        shown = tuple(with_tools(each, [tool], as_text=dialect.history.tools_as_text) for each in shown)
    prompt, whole = (template.render(each, tools=[tool]) for each in shown)
    assert not dialect.history.tools_in_message or "says it" in prompt
    # A prompt may open what the model thinks, which a message without thoughts does not have.
    end = next(at for at in range(len(whole)) if not prompt.startswith(whole[: at + 1]))
    begun = end if end == len(prompt) else whole.rindex("<", 0, end + 1)
    written, _, rest = whole[begun:].partition(RESULT)
    assert rest, "the result is shown"
    parsed = TOOL_PARSERS[dialect.tool_parser]({"get_weather": schema}).parse(written)
    assert [(each.name, json.loads(each.arguments)) for each in parsed.tool_calls] == [("get_weather", arguments)]
