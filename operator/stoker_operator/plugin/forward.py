"""`kubectl stoker chat` and `bench`: the runtime's own commands, through a port-forward that is made for them.

Invariants: the port-forward ends with the command; an API key reaches the command by its environment alone.
Knows nothing of what the commands do.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.kubectl import Kubectl

Object = Mapping[str, Any]
KEY = "OPENAI_API_KEY"
_FORWARDING = re.compile(r"^Forwarding from 127\.0\.0\.1:(\d+) ->")


@contextmanager
def forwarded(kubectl: Kubectl, service: Object) -> Iterator[str]:
    """The address on this machine under which the service answers. Raises PluginError where kubectl cannot."""
    name = service["metadata"]["name"]
    if "podTLS" in (service["spec"].get("endpoint") or {}):
        raise PluginError(
            f"the pods of {name} speak TLS with a certificate for their Service's name, not for a forwarded port. "
            f"Ask inside the cluster, or run `kubectl port-forward service/{name} LOCAL:PORT` for a client that takes "
            "the name apart from the address (curl --connect-to)."
        )
    port = int((service["spec"].get("endpoint") or {}).get("port", 8000))
    command = kubectl.command("port-forward", f"service/{name}", f":{port}", "--address=127.0.0.1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said = []
            for line in process.stdout or ():
                found = _FORWARDING.match(line)
                if found:
                    yield f"http://127.0.0.1:{found[1]}"
                    return
                said.append(line.strip())
            raise PluginError("; ".join(said) or "kubectl port-forward ended without a word.")
        finally:
            process.terminate()


def api_key(kubectl: Kubectl, service: Object) -> str:
    """The first key of the Secret that the service names, as far as the user may read it; "" where it asks for none."""
    given = os.environ.get(KEY, "")
    reference = ((service["spec"].get("endpoint") or {}).get("auth") or {}).get("apiKeysSecretRef")
    if given or reference is None:
        return given
    where = f"Secret {reference['name']}"
    try:
        data = kubectl.get("secret", reference["name"]).get("data") or {}
        lines = base64.b64decode(data[reference.get("key", "keys")]).decode().split()
        return lines[0]
    except (KeyError, IndexError, binascii.Error, UnicodeDecodeError):
        raise PluginError(f"{where} holds no key to use; give one in {KEY}.") from None
    except PluginError as error:
        raise PluginError(
            f"the service asks for an API key, and {where} cannot be read: {error} Give one in {KEY}."
        ) from None


def run(command: str, url: str, key: str, arguments: Sequence[str]) -> int:
    """Run `stoker COMMAND … --url URL` and return its exit status."""
    words = [sys.executable, "-m", "stoker_cli", *command.split(), *arguments, "--url", url]
    environment = os.environ | ({KEY: key} if key else {})
    with subprocess.Popen(words, env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the command got it too, and decides
