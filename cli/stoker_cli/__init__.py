"""The one `stoker` command: a table of subcommand → module:function that imports only the one asked for.

Invariants: importing this module imports nothing but the standard library, so the operator's image runs
its subcommands without torch and the runtime's image runs its own without kopf.
Knows nothing of what a subcommand does; each function takes the remaining arguments and returns an exit status.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple, cast


class Command(NamedTuple):
    """One subcommand: where its function lives, which extra installs it, and one line of help."""

    target: str
    extra: str
    help: str


COMMANDS: dict[str, Command] = {
    "serve": Command("stoker_runtime.__main__:main", "runtime", "serve a model over the OpenAI API"),
    "chat": Command("stoker_runtime.terminal.chat:main", "runtime", "talk to a running server from the terminal"),
    "bench": Command("stoker_runtime.bench.cli:main", "runtime", "measure the engine or a server"),
    "info": Command("stoker_runtime.terminal.info:main", "runtime", "show device, kernels and whether a model fits"),
    "tune": Command("stoker_runtime.terminal.tune:main", "runtime", "measure a model's products on this GPU, once"),
    "fetch": Command("stoker_runtime.fetch.cli:main", "runtime", "fetch and verify a model's files once"),
    "up": Command("stoker_operator.local.up:main", "operator", "run a manifest on this machine, without a cluster"),
    "operator": Command("stoker_operator.__main__:main", "operator", "run the Kubernetes operator"),
    "activator": Command("stoker_operator.activator.main:main", "operator", "hold requests of services that sleep"),
    "node-cache": Command("stoker_operator.node_cache.main:main", "operator", "keep models on a node's own disk"),
    "gateway": Command("stoker_operator.gateway.main:main", "operator", "one address for all models, by Envoy"),
}


INTERRUPTED = 130  # 128 + SIGINT, as a shell counts
TAIL = "\n\n`stoker COMMAND --help` tells more.\n"


def usage() -> str:
    """The help text: one line a subcommand."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "usage: stoker COMMAND [ARGUMENTS]\n\ncommands:\n" + "\n".join(lines) + TAIL


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("stoker")
    except PackageNotFoundError:
        return "0+source, not installed"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2 for a command that does not exist, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version", "version"):
        sys.stdout.write(f"stoker {_version()}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(f"stoker: unknown command {name!r}{hint}\n\n{usage()}")
        return 2
    module, _, function = command.target.partition(":")
    try:
        run = cast("Callable[[list[str]], int]", getattr(importlib.import_module(module), function))
        return run(rest)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stoker_"):
            raise
        sys.stderr.write(
            f"stoker {name}: the Python package {error.name!r} is missing; "
            f"install it with: pip install 'stoker[{command.extra}]'\n"
        )
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
