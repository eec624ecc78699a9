"""The user's own kubectl, as a process: contexts, credential plugins and rights are whatever they are there.

Invariants: no credential is read here; a refusal reaches the caller in kubectl's own words.
Knows nothing of InferenceServices.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_operator.plugin.errors import PluginError

Object = dict[str, Any]
# A kubectl that waits for an API server which is not there.
_SECONDS = 60


def add_flags(parser: argparse.ArgumentParser) -> None:
    """kubectl's own flags that say which cluster and namespace are meant."""
    which = parser.add_argument_group("which cluster")
    which.add_argument("-n", "--namespace", default="", help="namespace (default: the context's)")
    which.add_argument("--context", default="", help="context of the kubeconfig (default: the current one)")
    which.add_argument("--kubeconfig", default="", help="the kubeconfig (default: KUBECONFIG, then ~/.kube/config)")


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with the flags that its plugin was given. `program` is "" where there is none."""

    program: str
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace) -> Kubectl:
        """As the flags of `add_flags` say; KUBECTL names a program other than the one on PATH."""
        named = {name: getattr(options, name) for name in ("namespace", "context", "kubeconfig")}
        flags = tuple(f"--{name}={value}" for name, value in named.items() if value)
        return cls(os.environ.get("KUBECTL", "") or shutil.which("kubectl") or "", flags)

    def command(self, *arguments: str) -> list[str]:
        """The command line. Raises PluginError where there is no kubectl."""
        if not self.program:
            raise PluginError("kubectl is not on PATH; install it, or name it in the variable KUBECTL.")
        return [self.program, *self.flags, *arguments]

    def text(self, *arguments: str, stdin: str = "") -> str:
        """What kubectl prints. Raises PluginError with its own words when it fails."""
        done = self._run(arguments, stdin)
        if done.returncode:
            raise PluginError(done.stderr.strip() or f"kubectl {arguments[0]} ended with {done.returncode}.")
        return done.stdout

    def get(self, *arguments: str) -> Object:
        """One object, or a List. Raises PluginError."""
        found: Object = json.loads(self.text("get", *arguments, "--output=json"))
        return found

    def items(self, *arguments: str) -> list[Object]:
        """The objects of a list. Raises PluginError."""
        found: list[Object] = self.get(*arguments)["items"]
        return found

    def patch(self, resource: str, operations: Sequence[Mapping[str, Any]]) -> str:
        """A JSON patch; what kubectl says of it. Raises PluginError."""
        return self.text("patch", resource, "--type=json", f"--patch={json.dumps(list(operations))}")

    def lines(self, *arguments: str) -> Iterator[str]:
        """What kubectl prints, line by line as it comes, its errors among it; it ends with the iterator."""
        with subprocess.Popen(
            self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            try:
                yield from process.stdout or ()
            finally:
                process.terminate()

    def _run(self, arguments: Sequence[str], stdin: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                self.command(*arguments), input=stdin, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise PluginError(f"kubectl {arguments[0]} did not answer within {_SECONDS} s.") from None
        except OSError as error:
            raise PluginError(f"{self.program} cannot be run: {error.strerror}.") from None
