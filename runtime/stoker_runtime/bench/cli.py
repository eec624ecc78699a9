"""`stoker bench`: a table of what can be measured; only the one asked for is imported.

Invariants: each mode is a `main(argv) -> int` of its own. Knows nothing of how anything is measured.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from typing import cast

MODES = {
    "engine": ("stoker_runtime.bench.engine_mode", "the engine itself, its output checked, beside vLLM's figures"),
    "accuracy": ("stoker_runtime.bench.accuracy_mode", "what a quantization costs on a real model and text"),
    "drafts": ("stoker_runtime.bench.drafts_mode", "what verifying drafts costs, and what they bring, by kind of text"),
    "sampling": ("stoker_runtime.bench.sampling.mode", "what each way to choose tokens costs, beside greedy choice"),
    "offline": ("stoker_runtime.bench.offline_mode", "what LLM.generate costs over the bare loop that it drives"),
    "profile": ("stoker_runtime.bench.profile_step", "one decode step, kernel by kernel, on a GPU"),
    "start": ("stoker_runtime.bench.start_mode", "process start to first token, and the server's host memory"),
    "ranks": ("stoker_runtime.ranks.bench", "how long a step takes from the leader to the other ranks"),
    "http": ("stoker_runtime.bench.http_load", "a running server, by clients that wait for each answer"),
    "soak": ("stoker_runtime.bench.soak.mode", "minutes of mixed load, and what is held, grows or slows by it; faults"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:<8} {text}" for name, (_, text) in MODES.items()]
    return "usage: stoker bench MODE [ARGUMENTS]\n\nmodes:\n" + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Run one mode and return its exit status; 2 for a mode that does not exist."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    if argv[0] not in MODES:
        near = difflib.get_close_matches(argv[0], MODES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(f"stoker bench: unknown mode {argv[0]!r}{hint}\n\n{usage()}")
        return 2
    run = cast("Callable[[list[str]], int]", importlib.import_module(MODES[argv[0]][0]).main)
    return run(argv[1:])
