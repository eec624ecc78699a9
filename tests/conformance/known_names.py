"""What the clients are told of the servers, and what happens where a client is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import pytest

MODEL, KEY = "smollm2", "sk-conformance"


def require(package: str) -> None:
    """Skip the module where `package` is missing; in continuous integration nothing is missing."""
    if importlib.util.find_spec(package) is None and not os.environ.get("CI"):
        pytest.skip(f"{package} is not installed; see the extra 'conformance'", allow_module_level=True)


def client(package: str) -> ModuleType:
    """A client's package."""
    require(package)
    return importlib.import_module(package)
