"""`stoker serve`: flags → configuration → the model's place → engine → HTTP server.

Invariants: a configuration that cannot work ends with status 2 and one sentence, any other failed start with
status 1; a traceback is for bugs only.
Knows nothing of how a server lives; see serve/server.py.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.fetch.by_name import located
from stoker_runtime.process.exit_status import BAD_CONFIGURATION, run_until_exit
from stoker_runtime.process.log import set_up
from stoker_runtime.settings.flags import help_text
from stoker_runtime.settings.parse import describe, read

if TYPE_CHECKING:
    from stoker_runtime.engine.engine import AsyncEngine
    from stoker_runtime.engine.group import EngineGroup


def main(argv: list[str] | None = None) -> int:
    """Run `stoker serve` with `argv` (without the command's name) and return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(help_text())
        return 0
    try:
        config, ignored = read(arguments, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"stoker serve: {error.message}\n")
        return BAD_CONFIGURATION
    set_up(config.log_level, config.log_json)
    log = logging.getLogger("stoker_runtime.serve")
    log.info("starting: %s", describe(config))
    for line in ignored:
        log.warning("%s", line)
    return run_until_exit(serve(config), "the server")


async def serve(config: ServerConfig) -> int:
    """Find the model, start the engine's process, which takes longest, import the HTTP side beside it, and serve.

    A node beside the leader's has no engine's process, and answers probes alone.
    """
    if config.engine.nnodes > 1:
        from stoker_runtime.ranks.nodes.secret import read_secret

        read_secret(config.engine)
    engine = located(config.engine)
    # Clients use the name that the model was given by.
    config = replace(config, engine=engine, served_model_names=config.model_names)
    if engine.node_rank > 0:
        from stoker_runtime.serve.node import NodeServer

        return await NodeServer(config).run()

    from stoker_runtime.engine.process import EngineProcess

    processes = [
        await EngineProcess.spawn(each, log_level=config.log_level, log_json=config.log_json)
        for each in (replace(engine, data_parallel_rank=rank) for rank in range(engine.data_parallel_size))
    ]
    try:
        module = "stoker_runtime.serve.fleet" if config.api_server_count > 1 else "stoker_runtime.serve.server"
        await asyncio.to_thread(importlib.import_module, module)

        from stoker_runtime.engine.group import start_engines

        async def start_engine(engine: EngineConfig) -> AsyncEngine | EngineGroup:
            return await start_engines(engine, processes)

        if config.api_server_count > 1:
            from stoker_runtime.serve.fleet import Fleet

            return await Fleet(config, start_engine).run()

        from stoker_runtime.serve.server import Server

        return await Server(config, start_engine).run()
    finally:
        for process in processes:
            await process.close(0.0)


if __name__ == "__main__":
    sys.exit(main())
