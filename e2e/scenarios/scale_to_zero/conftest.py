"""The activator, which the chart brings when it is asked to: on for these scenarios, off again for the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube


@pytest.fixture(scope="module")
def activator(installed: Kube) -> Iterator[None]:
    """Switched on by an upgrade, as a person would, and off by another one."""

    def switch(value: str) -> None:
        settings = ("--reuse-values", f"--set=activator.enabled={value}")
        installed.helm("upgrade", "stoker", str(stoker.CHART), *settings, "--wait", "--timeout=180s")

    switch("true")
    yield
    switch("false")
