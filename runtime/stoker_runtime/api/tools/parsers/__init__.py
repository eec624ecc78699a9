"""The tool parsers by name. Names are vLLM's where vLLM has the family, so its command lines work unchanged.

Invariants: every name in TOOL_PARSERS makes a parser from the tools' schemas alone.
Knows nothing of how one is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker_runtime.api.tools.parsers.base import ToolParser
from stoker_runtime.api.tools.parsers.deepseek import DeepSeekParser, KimiParser
from stoker_runtime.api.tools.parsers.glm import GlmParser
from stoker_runtime.api.tools.parsers.glm4 import Glm4Parser
from stoker_runtime.api.tools.parsers.harmony import HarmonyParser
from stoker_runtime.api.tools.parsers.hermes import HermesParser
from stoker_runtime.api.tools.parsers.listed import (
    CohereParser,
    CommandRParser,
    GraniteParser,
    InternLMParser,
    NemotronParser,
    Phi4MiniParser,
)
from stoker_runtime.api.tools.parsers.llama import LlamaParser
from stoker_runtime.api.tools.parsers.minimax import MinimaxParser
from stoker_runtime.api.tools.parsers.mistral import MistralParser
from stoker_runtime.api.tools.parsers.pythonic import PythonicParser
from stoker_runtime.api.tools.parsers.qwen_coder import QwenCoderParser, SeedParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "qwen3_coder": QwenCoderParser,
    "qwen3_xml": QwenCoderParser,
    "llama3_json": LlamaParser,
    "llama4_json": LlamaParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "olmo3": PythonicParser,
    "minicpm": PythonicParser,
    "deepseek_v3": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
    "kimi_k2": KimiParser,
    "glm4": Glm4Parser,
    "glm45": GlmParser,
    "glm47": GlmParser,
    "granite": GraniteParser,
    "phi4_mini_json": Phi4MiniParser,
    "nemotron_json": NemotronParser,
    "cohere": CohereParser,
    "command_r": CommandRParser,
    "internlm": InternLMParser,
    "seed_oss": SeedParser,
    "minimax_m2": MinimaxParser,
    "openai": HarmonyParser,
    "gpt_oss": HarmonyParser,
}
