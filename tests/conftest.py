"""For all tests on a GPU: each begins with the memory that those before it held; a failure shows what was in use, and
one that costs the process its GPU ends the run by name, where every test after it would fail without saying why.
No example of hypothesis has a deadline: a test is never timed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# Which cases of the large matrices an ordinary run takes.
pytest_plugins = ["tests.matrix"]
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

GIB = 1024**3


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: no search for garbage is to walk through all of them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at the GPU after a test of it has failed."""
    report = yield
    torch = sys.modules.get("torch")
    if report.failed and item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        state, lost = gpu_state(torch)
        report.sections.append(("GPU", state))
        if lost:
            item.session.shouldstop = f"the GPU is lost since {item.nodeid}: {state}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """An engine is full of circles, and what it held of a GPU is in nobody else's reach until they are found."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def gpu_state(torch: Any) -> tuple[str, bool]:
    """What of the GPU's memory is in use; or why this process can do nothing on it any more, and True."""
    try:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:
        return str(error).partition("\n")[0], True
    return f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB in use", False
