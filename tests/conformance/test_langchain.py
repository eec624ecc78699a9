"""LangChain's standard suite in a process of its own: it leaves sockets open, and brings its own pytest plugins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from known_names import require

require("langchain_tests")
SUITE = Path(__file__).parent / "langchain_suite.py"
OPTIONS = (
    *("-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-o", "asyncio_default_test_loop_scope=session"),
    *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
    *("-W", "ignore:Received a Pydantic BaseModel V1", "-W", "ignore:Pydantic serializer warnings"),
)


def test_standard_suite(tiny_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(SUITE), *OPTIONS],
        env=os.environ | {"CONFORMANCE_URL": tiny_url, "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(re.findall(r"(\d+) passed", done.stdout)[-1])
    assert passed >= 33, "tests of the suite went missing"
