"""What models' own templates show, as they are published: a folder of `ORG/NAME/` with `tokenizer_config.json` or
`chat_template.jinja`, as hubs have them, which STOKER_PUBLISHED_TEMPLATES names. They are their makers': none is here.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from stoker_runtime.api.tools.dialect import choose_dialect
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
            seen.add(family)
    assert len(seen) > 3, f"{NAMED} has templates of {sorted(seen)} alone"
