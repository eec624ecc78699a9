"""All ranks beside the leader's, as the leader holds them: told of steps, watched, ended together.

Those of its own machine are its team; those of other nodes are behind a connection to each.

Invariants: no rank outlives another. When one has died or hangs, all are killed, and then the leader's process ends or
its next step raises, as it was asked to. The file by which they meet has no name, and is there until they have ended:
NCCL looks into it once a second, and a group's end waits for that thread, which waits for a file that is gone.
Knows nothing of models and batches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import EngineDeadError
from stoker_runtime.parallel.meeting import Meeting
from stoker_runtime.parallel.place import LEADER, places
from stoker_runtime.ranks.nodes.connection import Lost
from stoker_runtime.ranks.nodes.leader import Nodes
from stoker_runtime.ranks.team import COMMAND, Team, life_of
from stoker_runtime.ranks.watch import WATCH_SECONDS, Life, Watch

STOP_SECONDS = 5.0
LAST_WORDS_SECONDS = 1.0
"""How long the leader may still say what has failed, once the other ranks are killed: gloo lets it go then."""
GPU_WORDS_SECONDS = 0.25
"""The same on GPUs, where a leader that waits in an exchange waits on."""
START_WORDS_SECONDS = 10.0
"""The same in a start: what one rank stumbles over, the leader does too, and says it better."""

log = logging.getLogger(__name__)


class Crew:
    """The ranks beside the leader."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = COMMAND,
        on_fault: Callable[[str], None] | None = None,
        team: type[Team] = Team,
    ) -> None:
        """Start the processes of this machine, and let other nodes join.

        `on_fault` is called, in a thread, when a rank has died or hangs and all are killed. Raises ConfigError.
        """
        self.config = config
        self.calls = 0
        """Odd within a call of the leader's that other ranks can keep waiting."""
        self.fault = ""
        self._on_fault = on_fault
        self.places = places(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            whole_experts=config.enable_expert_parallel,
            nodes=config.nnodes,
        )
        self._is_ready = False
        self._ended = threading.Event()
        self._found = threading.Event()
        self._nodes = Nodes.open(config) if config.nnodes > 1 else None
        self._meeting_file = os.memfd_create("stoker-meeting")
        self._leaves_at_once = False
        self._words_seconds = START_WORDS_SECONDS
        self._team = team([place for place in self.places[1:] if place.node == self.places[LEADER].node], command)
        if self._nodes is None:
            self._meeting = Meeting(f"/proc/{os.getpid()}/fd/{self._meeting_file}")
            self._team.tell(config, self._meeting)

    @property
    def pids(self) -> list[int]:
        """The other ranks' processes on this machine, in their order."""
        return self._team.pids

    @property
    def owns_process(self) -> bool:
        """Whether this process is there for the ranks alone, and ends with them."""
        return self._on_fault is not None

    def watch(self) -> None:
        """Begin to watch. Until `ready` only a death counts."""
        threading.Thread(target=self._watch, name="stoker-ranks", daemon=True).start()

    def gather(self) -> Meeting:
        """Where all ranks meet, once every node has joined. Raises EngineError when one does not."""
        if self._nodes is not None:
            self._meeting = self._nodes.gather(self.check)
            self._team.tell(self.config, self._meeting)
        return self._meeting

    def ready(self, *, on_gpu: bool, longest_step: float = 0.0) -> None:
        """All ranks have met and built what they need: from now on silence counts that is longer than a step."""
        self._limits = Watch(WATCH_SECONDS, on_gpu=on_gpu, longest_step=longest_step)
        self._words_seconds = GPU_WORDS_SECONDS if on_gpu else LAST_WORDS_SECONDS
        self._is_ready, self._leaves_at_once = True, not on_gpu
        if self._nodes is not None:
            self._nodes.ready()

    def write(self, message: bytes) -> None:
        """Tell every rank. Raises EngineDeadError when they are gone."""
        if self._nodes is not None:
            try:
                self._nodes.write(message)
            except Lost as error:
                raise self.explain(error) from error
        self._team.write(message, self.check)

    def check(self) -> None:
        """Raises EngineDeadError when a rank has died or hangs."""
        if self.fault:
            raise EngineDeadError(f"The ranks ended: {self.fault}.")

    def explain(self, error: Exception) -> EngineDeadError:
        """The error of a step that failed as `error`, which may be for the fault of a rank that is being found out.

        Else it is the leader's own, for whose part the others wait in vain: they are killed.
        """
        if not self._found.wait(LAST_WORDS_SECONDS):
            self.fault = f"{type(error).__name__}: {error}"
        return EngineDeadError(f"The ranks ended: {self.fault}.")

    def close(self) -> None:
        """Wait a moment for the ranks to end, which they were told, then kill them. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        patience = STOP_SECONDS if self._is_ready and not self.fault else 0.0
        self._team.close(patience)
        if self._nodes is not None:
            self._nodes.close(patience)
        # A group looks into the file when it ends: gloo's when the ranks leave it, one that was left behind and NCCL's,
        # which a profiler holds as well, maybe with the process. It would end in what else had the file's number then.
        if self._leaves_at_once and not self.fault:
            os.close(self._meeting_file)

    def _watch(self) -> None:
        reason = None
        with self._team.deaths() as next_death:
            while reason is None:
                reason = next_death(WATCH_SECONDS) or self.fault or None
                if self._ended.is_set():
                    if self.fault and self._on_fault is not None:
                        self._on_fault(self.fault)  # what the leader still does may wait for a GPU for ever
                    return
                if reason is None and self._nodes is not None:
                    reason = self._nodes.tick(time.monotonic())
                if reason is None and self._is_ready:
                    reason = self._limits.tick(time.monotonic(), self._lives(), self.calls)
        self._end(reason)

    def _lives(self) -> list[Life]:
        others = self._nodes.lives() if self._nodes is not None else []
        return [life_of(os.getpid()), *self._team.lives(), *others]

    def _end(self, reason: str) -> None:
        self.fault = reason
        self._found.set()
        log.critical("%s; all ranks end", reason)
        if self._nodes is not None:
            self._nodes.end(reason)
        self._team.kill()
        if self._on_fault is None:
            return
        gives_up = self._ended.wait(self._words_seconds)
        # A leader that gives up its start has an error of its own, which it tells before its process ends.
        if self._is_ready or not gives_up:
            self._on_fault(reason)
