"""A terminal session: commands as a person types them, and what they print, kept as a text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from e2e.scenarios.kube import CommandFailed, Kube

ROOT = Path(__file__).resolve().parents[2]


class Session:
    """Runs commands in a shell at the repository's root, in one namespace."""

    def __init__(self, kube: Kube, folder: Path) -> None:
        self._tools = folder / "bin"
        self._tools.mkdir()
        for name, path in (("kubectl", kube.kubectl_path), ("helm", kube.helm_path)):
            (self._tools / name).symlink_to(path)
        config = folder / "kubeconfig"
        config.write_bytes(kube.kubeconfig.read_bytes())
        config.chmod(0o600)
        self._environment = os.environ | {"KUBECONFIG": str(config), "PATH": f"{self._tools}:{os.environ['PATH']}"}
        self.text = ""
        self._shell(f"kubectl config set-context --current --namespace={kube.namespace}")

    def run(self, command: str, *, hidden: str = "") -> str:
        """Run a command and keep it with its output; `hidden` flags are given, not shown. Raises CommandFailed."""
        output = self._shell(f"{command} {hidden}".strip())
        self.text += f"$ {command}\n{output}\n" if output.strip() else f"$ {command}\n"
        return output

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=400
        )
        if done.returncode:
            raise CommandFailed(f"{command}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout
