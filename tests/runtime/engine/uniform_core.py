"""An engine process that builds the uniform executor: what `AsyncEngine.start(command=…)` runs in these tests.

The first argument picks how it behaves: `ok`, `adapters` (`ok` with room for some), `slow` (20 ms a step), `sleepy`
(`slow`, and what `UniformSleeper` does by a folder),
`fails-at-N` (the executor breaks in step N),
`stumbles-at-N` (step N fails, the executor goes on), `no-model` (the start fails), `bug` (the start crashes), `late`
(the start takes a minute).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from uniform_executor import UniformAdapters, UniformExecutor, UniformLaunched
from uniform_sleeper import UniformSleeper

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.__main__ import main
from stoker_runtime.errors import EngineError, ModelError
from stoker_runtime.step.batch import Batch
from stoker_runtime.weights.upload_ahead import UploadAhead


class FailingExecutor(UniformExecutor):
    """Raises `error` in one step."""

    fails_at = 0
    error: Exception = RuntimeError("the device fell off the bus")

    def execute(self, batch: Batch) -> UniformLaunched:
        if batch.step == self.fails_at:
            self.batches += 1
            self.sampled = self.batches
            self.unread.clear()
            raise self.error
        return super().execute(batch)


def build(config: EngineConfig, ahead: UploadAhead | None) -> UniformExecutor:
    mode = sys.argv[1]
    if mode == "no-model":
        raise ModelError(f"{config.model}: no such checkpoint")
    if mode == "bug":
        raise ZeroDivisionError("a bug in the start")
    if mode == "late":
        time.sleep(60)
    sizes = {"num_pages": 512, "page_size": 16, "max_model_len": 4096, "max_num_batched_tokens": 256}
    if mode in ("ok", "late"):
        return UniformExecutor(**sizes)
    if mode == "adapters":
        return UniformExecutor(**sizes, adapters=UniformAdapters(2, 3))
    if mode == "sleepy":
        sleeper = UniformSleeper(Path(sys.argv[2]))
        sleepy = UniformExecutor(**sizes, step_seconds=0.02, sleeper=sleeper)
        sleeper.pages = sleepy.kv
        return sleepy
    if mode == "slow":
        return UniformExecutor(**sizes, step_seconds=0.02)
    executor = FailingExecutor(**sizes, step_seconds=0.001)
    kind, _, step = mode.partition("-at-")
    executor.fails_at = int(step)
    if kind == "stumbles":
        executor.error = EngineError("one step went wrong")
    return executor


if __name__ == "__main__":
    sys.exit(main(build))
