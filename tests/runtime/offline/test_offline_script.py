"""A script written for vLLM's offline interface runs on ours; of it only the name of the package changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "offline_script.py"


def test_the_script_runs(tmp_path: Path) -> None:
    source = SCRIPT.read_text()
    assert source.count("from vllm") == 4
    script = tmp_path / "script.py"
    script.write_text(source.replace("from vllm", "from stoker_runtime"))
    roots = os.pathsep.join(str(ROOT / name) for name in ("runtime", "kernels"))
    environment = os.environ | {"PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Prompt: 'Hello, my name is', 17 tokens, Generated text: ")
    assert [line for line in lines if line.startswith("Reason")] == ["Reason: length, 8 tokens"] * 3
    assert lines[6:] == [
        "Ids: None 3",
        "Mixed: [3, 4]",
        "Logprobs: 2 4",
        *["JSON: True"] * 3,
        "Choice: True",
        "Regex: 9 True",
        "Grammar: True",
        "Beams: 3 True True",
        "Chat: 'user: Write an essay.\\n' True",
        "Template: True True",
    ]
    assert "sequences" not in done.stderr, "no line of progress where nobody watches"
