"""The kernels of GGUF's blocks on the emulator, compiled once for all tests here."""

from __future__ import annotations

import ctypes

import pytest
from tests.kernels.emulator.blocks import BlockMachine, compile_blocks


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_blocks(tmp_path_factory.mktemp("blocks"))


@pytest.fixture
def machine(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> BlockMachine:
    machine = BlockMachine(library)
    machine.install(monkeypatch)
    return machine
