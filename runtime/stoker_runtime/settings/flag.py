"""What one setting of `stoker serve` is, and the groups in which its help stands.

Invariants: a flag, its `STOKER_*` variable and its key in a config file are one entry, so they cannot differ.
Knows nothing of which settings there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker_runtime.settings.values import switch

PREFIX = "STOKER_"


def variable(name: str) -> str:
    """The environment variable of the flag `--name`."""
    return PREFIX + name.replace("-", "_").upper()


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `field` is where it goes: a field of EngineConfig, else of ServerConfig; "" for what is read here.

    `many`: it may be repeated, and a variable separates values by commas; `words`: one flag takes several values.
    `secret` values are never quoted. A `switch` needs no value and has a `--no-` form, which `opposites` are too.
    """

    name: str
    field: str
    convert: Callable[[str], Any]
    group: str
    help: str
    shown: str = "VALUE"
    many: bool = False
    words: bool = False
    secret: bool = False
    aliases: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable of the same setting."""
        return variable(self.name)

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return self.convert is switch


MODEL, MEMORY, NODES, SCHEDULING = "Model", "Memory", "Nodes", "Scheduling"
KERNELS, SERVER = "Kernels", "Server"
