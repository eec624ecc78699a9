"""One of several API processes: `python -m stoker_runtime.serve.api_process`, started by fleet.py.

Invariants: what it needs comes pickled through its standard input: its assignment, and when the engine is ready, the
engines' endpoints, or None when there will be none. When that pipe closes, the process ends, whatever it is doing.
Knows nothing of the other API processes but the board that they share.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from stoker_runtime.api.limits.ledger import Ledger
from stoker_runtime.api.responses.store import ResponseStore
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.engine.group import EngineGroup, attach_engines
from stoker_runtime.errors import EngineError
from stoker_runtime.process.board import Board
from stoker_runtime.process.exit_status import FAILED, run_until_exit
from stoker_runtime.process.log import set_up
from stoker_runtime.process.parent import exit_with_parent
from stoker_runtime.serve.fleet import Assignment
from stoker_runtime.serve.server import Seat, Server


def main(stream: BinaryIO) -> int:
    """Serve until a signal; the exit status."""
    assignment = pickle.load(stream)
    if not isinstance(assignment, Assignment):
        raise TypeError(f"an API process needs an Assignment first, not a {type(assignment).__name__}")
    set_up(assignment.config.log_level, assignment.config.log_json, assignment.name)
    return run_until_exit(serve(assignment, stream), "the API process")


async def serve(assignment: Assignment, stream: BinaryIO) -> int:
    """Serve at the assigned place."""

    def clean_up() -> None:
        shutil.rmtree(assignment.folder, ignore_errors=True)

    async def attach(_: EngineConfig) -> AsyncEngine | EngineGroup:
        endpoints = await asyncio.to_thread(read_endpoints, stream, clean_up)
        if endpoints is None:
            await asyncio.Event().wait()  # for the signal that comes with it
            raise EngineError("the server ends before its engine is ready")
        threading.Thread(target=exit_with_parent, args=(stream, clean_up), daemon=True).start()
        return await attach_engines(endpoints)

    board = Board.mapped(assignment.board, assignment.rows, assignment.row)
    listener = socket.socket(fileno=assignment.listener)
    store = ResponseStore(assignment.config.response_store_bytes, f"{assignment.folder}/responses", assignment.row)
    ledger = Ledger(f"{assignment.folder}/rate-limits")
    return await Server(assignment.config, attach, Seat(listener, board, store, ledger)).run()


def read_endpoints(stream: BinaryIO, clean_up: Callable[[], None]) -> tuple[str, ...] | None:
    """Wait until the engines are ready (None: the server ends before). Cleans up and ends when the parent is gone."""
    try:
        endpoints: tuple[str, ...] | None = pickle.load(stream)
    except EOFError:
        clean_up()
        os._exit(FAILED)
    return endpoints


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer))
