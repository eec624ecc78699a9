"""A person with `kubectl stoker`: run as kubectl finds it, in one namespace.

Knows nothing of what a person wants.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from e2e.scenarios.kube import Kube

Plugin = Callable[..., str]


def plugin_of(kube: Kube, folder: Path, *, secret: str = "") -> Plugin:
    """Runs `kubectl stoker …` and returns what it prints, in which `secret` never stands. `folder` is its own."""
    script = folder / "kubectl-stoker"
    code = "import sys; from stoker_operator.plugin.cli import main; sys.exit(main())"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    script.chmod(0o755)
    (folder / "kubectl").symlink_to(kube.kubectl_path)
    where = [f"--kubeconfig={kube.kubeconfig}", f"--namespace={kube.namespace}"]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "NO_PROXY": "127.0.0.1"}
    environment.pop("OPENAI_API_KEY", None)

    def run(*words: str) -> str:
        mark = words.index("--") if "--" in words else len(words)
        command = [str(folder / "kubectl"), "stoker", *words[:mark], *where, *words[mark:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        assert not secret or secret not in done.stdout + done.stderr
        return done.stdout

    return run
