"""A fault in the middle of one rank's step, for every process that has this folder on its PYTHONPATH.

`STRIKE` says which, of which rank and where: `memory:1:/folder`. It comes with the first step after a file `now` is in
that folder; a file `struck` then says when, by the clock that all processes share.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

WHERE = "stoker_runtime.ranks.executors"
FAULT, RANK, FOLDER = os.environ["STRIKE"].split(":")


class Finder:
    """Changes the module once it is imported, so that no process imports what it does not need."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WHERE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def change(module: ModuleType) -> None:
    ordinary = module.Executor.execute

    def execute(self: Any, batch: Any) -> Any:
        if self.decoder.collectives.place.rank == int(RANK) and Path(FOLDER, "now").exists():
            strike()
        return ordinary(self, batch)

    module.Executor.execute = execute


def strike() -> None:
    import torch

    part = Path(FOLDER, "part")
    part.write_text(str(time.monotonic()))
    part.rename(part.with_name("struck"))
    if FAULT == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if FAULT == "device":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    threading.Event().wait()


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
