"""What the API process loads: start time and memory depend on it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "triton", "numpy", "httpx", "PIL")


def test_the_api_process_imports_nothing_heavy() -> None:
    code = (
        "import sys, stoker_runtime.__main__, stoker_runtime.serve.server, stoker_runtime.engine.engine;"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
