"""A whole server whose engine process builds the uniform executor of tests/runtime/engine: what test_server.py runs.

Arguments: how the engine behaves (see uniform_core.py), then the flags of `stoker serve`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.engine import AsyncEngine
from stoker_runtime.errors import ConfigError, EngineError
from stoker_runtime.process.log import set_up
from stoker_runtime.serve.fleet import Fleet
from stoker_runtime.serve.server import Server
from stoker_runtime.settings.parse import parse

CORE = Path(__file__).parents[1] / "runtime" / "engine" / "uniform_core.py"


def main() -> int:
    mode, flags = sys.argv[1], sys.argv[2:]
    config = parse(["uniform", "--tokenizer", "shape:uniform", *flags], {})
    set_up("info")

    async def start_engine(engine: EngineConfig) -> AsyncEngine:
        return await AsyncEngine.start(engine, command=(sys.executable, str(CORE), mode))

    async def serve() -> int:
        if config.api_server_count > 1:
            return await Fleet(config, start_engine).run()
        return await Server(config, start_engine).run()

    try:
        return asyncio.run(serve())
    except (ConfigError, EngineError) as error:
        sys.stderr.write(f"failed: {error.message}\n")
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    os.environ["PYTHONUNBUFFERED"] = "1"
    sys.exit(main())
