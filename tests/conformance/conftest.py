"""Two servers for all clients, one with a small real model and one with a tiny random one; nobody here changes them."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import real_models

sys.path.insert(0, str(Path(__file__).parents[1] / "api"))
sys.path.insert(0, str(Path(__file__).parent))

from known_names import KEY, MODEL
from server_process import ServerProcess


@pytest.fixture(scope="module", autouse=True)
def _sockets_of_clients() -> Iterator[None]:
    """Clients that keep connections open leave them to the garbage collector, which would warn in some later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_models.smollm2()


def served(model: str, *flags: str) -> Iterator[str]:
    """The address of a server, for as long as the iterator lives."""
    program = [sys.executable, "-m", "stoker_cli", "serve", model]
    process = ServerProcess(program, "--device", "cpu", "--api-key", KEY, *flags)
    try:
        yield process.wait_ready(120).url
    finally:
        process.close()


@pytest.fixture(scope="session")
def url(smollm2: Path) -> Iterator[str]:
    """The address of a server with a real model."""
    # In 32 bits, as the references that its answers are held against.
    flags = ("--max-model-len", "1024", "--dtype", "float32")
    yield from served(str(smollm2), "--served-model-name", MODEL, *flags)


@pytest.fixture(scope="session")
def tiny_url() -> Iterator[str]:
    """The address of a server with random weights and a byte tokenizer: every answer is quick, none makes sense."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    template = str(Path(__file__).parent / "chatml_tools.jinja")
    yield from served("shape:tiny", "--served-model-name", "tiny", "--chat-template", template, *tools)
