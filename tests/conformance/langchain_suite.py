"""`langchain-openai` through LangChain's own standard suite for chat models; test_langchain.py runs it."""

from __future__ import annotations

import os

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

FREE_CALL = "a model of 135M parameters does not decide to call a function by itself"


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
            "max_tokens": 64,
            "logit_bias": {"34": 100, "44": 80, "93": 80, "125": 90},
            "stream_usage": True,
            "max_retries": 0,
            "timeout": 120,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True
