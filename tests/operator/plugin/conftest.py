"""Fixtures of the plugin's tests: the plugin as kubectl finds it, and the reconciles of tests/operator/reconcile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.operator.reconcile.conftest import engine, gauges, look, node, ready, serve

__all__ = ["engine", "gauges", "look", "node", "ready", "serve"]
SCRIPTS = {"kubectl-stoker": "main", "kubectl_complete-stoker": "complete"}
Plugin = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def stoker(namespace: str, tmp_path: Path) -> Plugin:
    """Run `kubectl stoker …` in the test's namespace: the real kubectl, which finds the plugin by its name."""
    from e2e.cluster.binaries import ensure

    kubectl = ensure(["kubectl"])["kubectl"]
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kubectl").symlink_to(kubectl)
    for name, function in SCRIPTS.items():
        code = f"import sys; from stoker_operator.plugin.cli import {function}; sys.exit({function}())"
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"

    def run(*words: str, verb: str = "stoker", stdin: str = "") -> subprocess.CompletedProcess[str]:
        where = [f"--namespace={namespace}"] if verb == "stoker" else []
        command = [str(tools / "kubectl"), verb, *words, *where]
        environment = os.environ | {"PATH": path}
        return subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, timeout=120)

    return run
