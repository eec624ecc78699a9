"""Makes the uniform-logits executor beside the tests importable, here and in the processes that tests start; skips
tests that need a GPU where there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: needs a CUDA device"))
