"""`langchain-openai` through LangChain's own standard suite for chat models; test_langchain.py runs it."""

from __future__ import annotations

import os

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

PREFERRED, FORBIDDEN = '3:,]}"', "\n\r\t"
NEVER = (*(str(ord(each)) for each in FORBIDDEN), "256", "258", "259")
BIAS = {str(ord(each)): 60 + 5 * rank for rank, each in enumerate(PREFERRED)} | dict.fromkeys(NEVER, -100)
"""Random weights under a schema: whatever may end ends, nobody waits for white space, and the number is 3:
the ids beyond the bytes are words of digits, but for 257, which ends."""
NO_WILL = "random weights do not decide to call a function by themselves"


class TestLangChain(ChatModelIntegrationTests):
    """Every test of the suite that a text model can take."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "model": "tiny",
            "base_url": f"{os.environ['CONFORMANCE_URL']}/v1",
            "api_key": "sk-conformance",
            "temperature": 0,
            "max_tokens": 96,
            "logit_bias": BIAS,
            "stream_usage": True,
            "max_retries": 0,
            "timeout": 120,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason=NO_WILL)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="random weights do not write a name that they were told")
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:
        super().test_unicode_tool_call_integration(model)

    @pytest.mark.xfail(reason="random weights fill a text with nothing")
    def test_bind_runnables_as_tools(self, model: BaseChatModel) -> None:
        super().test_bind_runnables_as_tools(model)

    @pytest.mark.xfail(reason="random weights write some object, not the one that the prompt describes")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)
