"""LangChain's standard suite in a process of its own: it leaves sockets open, and brings its own pytest plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parent / "langchain_suite.py"
OPTIONS = (
    *("-p", "no:cacheprovider", "-o", "asyncio_default_test_loop_scope=session"),
    *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
)


def test_standard_suite(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(SUITE), *OPTIONS],
        env=os.environ | {"CONFORMANCE_URL": url, "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
