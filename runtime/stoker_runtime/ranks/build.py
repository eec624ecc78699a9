"""From an EngineConfig to a running executor, on one rank or several.

Invariants: one rank is built in this process as it always was: nothing of this package is in its way. Several are
started before torch is imported here, so that a start takes as long as one rank's.
Knows nothing of requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.parallel.place import LEADER
from stoker_runtime.process.exit_status import FAILED
from stoker_runtime.ranks.crew import Crew

if TYPE_CHECKING:
    from stoker_runtime.executor.executor import Executor
    from stoker_runtime.executor.pooling import PoolingExecutor
    from stoker_runtime.parallel.group import EarlyGroup
    from stoker_runtime.weights.upload_ahead import UploadAhead


def build_model(
    config: EngineConfig,
    ahead: UploadAhead | None = None,
    *,
    on_fault: Callable[[str], None] | None = None,
    crew: Crew | None = None,
) -> Executor | PoolingExecutor:
    """Load the model on all ranks that `config` asks for; errors as `executor.build.build_model`.

    `on_fault` is called when a rank has died or hangs; without one the next step raises EngineDeadError. `crew` is what
    was started of the other ranks.
    """
    if config.ranks == 1:
        from stoker_runtime.executor.build import build_model as build_one

        return build_one(config, ahead)
    config.validate()
    return lead(crew or Crew(config, on_fault=on_fault))


def build_executor(config: EngineConfig) -> Executor:
    """`build_model` of a model that generates. Raises ConfigError for one that does not, too."""
    from stoker_runtime.executor.pooling import PoolingExecutor

    executor = build_model(config)
    if isinstance(executor, PoolingExecutor):
        executor.close()
        raise ConfigError(f"{config.model} does not generate text.", param="model")
    return executor


def lead(crew: Crew) -> Executor:
    """Build the leader's rank, and wait for the others. Ends them when that fails.

    Raises EngineError for nodes that do not join, too.
    """
    early: EarlyGroup | None = None
    try:
        crew.watch()
        config, place = crew.config, crew.places[LEADER]
        from stoker_runtime.parallel import group

        if place.nodes == 1 and crew.owns_process:
            early = group.EarlyGroup.begin(config, place, crew.gather())
        from stoker_runtime.executor.build import build_rank
        from stoker_runtime.parallel.rank import Rank
        from stoker_runtime.ranks.executors import LeadingExecutor
        from stoker_runtime.ranks.longest_step import longest_step

        # Other nodes join meanwhile: importing torch takes longer.
        rank = Rank(config, place, crew.gather(), early)
        executor = build_rank(config, rank, partial(LeadingExecutor, others=crew))
        longest = longest_step(executor.decoder.spec, executor.config)
        crew.ready(on_gpu=executor.device.type == "cuda", longest_step=longest)
    except BaseException:
        crew.close()
        raise
    return executor


def end_process(reason: str) -> None:
    """End this process, whatever it is doing: an exchange that never answers cannot be called off."""
    os._exit(FAILED)
