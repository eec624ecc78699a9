"""The adapters that an engine serves: loaded and unloaded under their names while requests run.

A folder is read beside the steps, and nothing is changed before it was read whole. The host holds a bounded
number of copies, least recently used given up first; one that is wanted again is read again, and the sequences that
want it are held back until it is there.

Invariants: an adapter that was unloaded is served to the sequences that have it until the last one ends. A number is
never used twice. Called by the step loop's thread. Knows nothing of devices, messages or text.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from stoker_runtime.config import LoraModule
from stoker_runtime.engine.executor_protocol import AdapterHolder
from stoker_runtime.errors import ConfigError, NotFoundError, RequestError, StokerError, UnsupportedError
from stoker_runtime.request import Adapter, FinishReason
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.sequence import Sequence

READ_WAIT_SECONDS = 0.005
"""How long a loop without other work waits for a folder before it looks for messages again."""
OFF = "This server was started without --enable-lora, so it serves no adapters."

Told = Callable[[StokerError | None], None]
"""Told how a load ended: None when the adapter is served."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reading:
    """A folder on its way to host memory; `told` is there where it is read to be served under its name."""

    adapter: Adapter
    future: Future[Any]
    told: Told | None
    replaces: bool = False


class Adapters:
    """All adapters of one engine. `holder` None: it serves none."""

    def __init__(self, scheduler: Scheduler, holder: AdapterHolder | None) -> None:
        self.served: dict[str, Adapter] = {}
        self._scheduler = scheduler
        self._holder = holder
        self._known: dict[int, Adapter] = {}
        """Those served, and those whose sequences have not all ended."""
        self._users: Counter[int] = Counter()
        self._copies: OrderedDict[int, None] = OrderedDict()
        self._reading: list[_Reading] = []
        self._held: list[Sequence] = []
        self._numbers = itertools.count(1)
        if holder is not None:
            scheduler.on_end = self._ended

    @property
    def busy(self) -> bool:
        """Whether folders are being read."""
        return bool(self._reading)

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """The names of adapters that are served, or whose sequences have not all ended."""
        return tuple(self._known[number].name for number in numbers)

    def load(self, name: str, path: str, parent: str, told: Told, *, replace: bool = False) -> None:
        """Read the folder `path` and serve it as `name`; `told` comes from a later `take_over`.

        With `replace`, an adapter of that name gives way to it. Raises RequestError for a name that is taken, and
        UnsupportedError where no adapters are served.
        """
        holder = self._require()
        if not name:
            raise RequestError("An adapter needs a name.", param="lora_name")
        pending = any(each.told and each.adapter.name == name for each in self._reading)
        if pending or (name in self.served and not replace):
            raise RequestError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                param="lora_name",
            )
        adapter = Adapter(next(self._numbers), name, path, parent)
        self._reading.append(_Reading(adapter, holder.begin(adapter.number, path), told, replace))

    def load_now(self, name: str, path: str, parent: str = "", *, replace: bool = False) -> Adapter:
        """`load`, and wait for it. Raises what makes it fail."""
        errors: list[StokerError | None] = []
        self.load(name, path, parent, errors.append, replace=replace)
        while not errors:
            self.take_over(StepOutput(), idle=True)
        if errors[0] is not None:
            raise errors[0]
        return self.served[name]

    def load_configured(self, module: LoraModule) -> None:
        """`load_now` at the start. Raises ConfigError."""
        try:
            self.load_now(module.name, module.path, module.parent)
        except RequestError as error:
            raise ConfigError(f"lora_modules, {module.name}: {error.message}", param="lora_modules") from error

    def unload(self, name: str) -> None:
        """Serve no new requests with it. Raises NotFoundError."""
        self._require()
        if name not in self.served:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._retire(self.served.pop(name))

    def add(self, sequence: Sequence) -> None:
        """A new sequence, that may have an adapter; held back until its copy is in host memory."""
        number = sequence.request.adapter
        if not number:
            return
        self._users[number] += 1
        if number in self._copies:
            self._copies.move_to_end(number)
        else:
            sequence.held_for_adapter = True
            self._held.append(sequence)
            self._read_held()

    def require(self, number: int) -> None:
        """Raise NotFoundError unless new requests may name this adapter, RequestError for what is no number at all."""
        given: object = number
        if type(given) is not int:
            raise RequestError(f"adapter must be the number of an adapter; got {given!r:.100}.", param="model")
        if number and all(adapter.number != number for adapter in self.served.values()):
            raise NotFoundError("The adapter of this request was unloaded.", param="model", code="model_not_found")

    def take_over(self, output: StepOutput, *, idle: bool) -> None:
        """Take in the folders that were read; sequences whose adapter could not be read again end, in `output`.

        An `idle` loop waits a moment for one.
        """
        if self._reading:
            self._require().poll()
        if idle and self._reading:
            wait([each.future for each in self._reading], READ_WAIT_SECONDS, FIRST_COMPLETED)
        finished = [each for each in self._reading if each.future.done()]
        if not finished:
            return
        self._reading = [each for each in self._reading if not each.future.done()]
        for reading in finished:
            self._finish(reading, output)
        self._read_held()

    def _finish(self, reading: _Reading, output: StepOutput) -> None:
        adapter, cause = reading.adapter, reading.future.exception()
        if cause is not None:
            error = _explained(adapter, cause)
            if reading.told is not None:
                reading.told(error)
            else:
                self._refuse(adapter, error, output)
            return
        if reading.told is None and adapter.number not in self._known:
            # It was unloaded, and the last sequence that wanted it has ended.
            self._require().drop(adapter.number)
            return
        if reading.told is not None:
            if (before := self.served.get(adapter.name)) is not None and reading.replaces:
                self._retire(before)
            self.served[adapter.name] = self._known[adapter.number] = adapter
            log.info("adapter %s: %s, rank %d", adapter.name, adapter.path, reading.future.result().rank)
        if self._make_room():
            self._keep(adapter.number, reading.future.result())
        else:
            self._require().drop(adapter.number)
        if reading.told is not None:
            reading.told(None)

    def _keep(self, number: int, copy: Any) -> None:
        self._require().keep(number, copy)
        self._copies[number] = None
        for sequence in [each for each in self._held if each.request.adapter == number]:
            sequence.held_for_adapter = False
            self._held.remove(sequence)

    def _make_room(self) -> bool:
        """Room for one more copy; False when all there are belong to sequences that have not ended."""
        if len(self._copies) < self._require().host_copies:
            return True
        idle = next((number for number in self._copies if not self._users[number]), None)
        if idle is None:
            return False
        self._drop(idle)
        return True

    def _read_held(self) -> None:
        """Begin to read what the first of the held sequences want, as far as there will be room."""
        holder = self._require()
        coming = {each.adapter.number for each in self._reading}
        wanted = dict.fromkeys(each.request.adapter for each in self._held if each.request.adapter not in coming)
        busy = sum(1 for number in self._copies if self._users[number]) + len(coming)
        for number in list(wanted)[: max(0, holder.host_copies - busy)]:
            adapter = self._known[number]
            self._reading.append(_Reading(adapter, holder.begin(number, adapter.path), None))

    def _refuse(self, adapter: Adapter, error: StokerError, output: StepOutput) -> None:
        for sequence in [each for each in self._held if each.request.adapter == adapter.number]:
            sequence.error = f"Its adapter {adapter.name} cannot be read again: {error.message}"
            self._scheduler.end(sequence, FinishReason.ERROR, output)

    def _ended(self, sequence: Sequence) -> None:
        number = sequence.request.adapter
        if not number:
            return
        self._users[number] -= 1
        if sequence.held_for_adapter:
            self._held.remove(sequence)
        if not self._users[number]:
            del self._users[number]
            if all(adapter.number != number for adapter in self.served.values()):
                self._retire(self._known[number])
        if self._held:
            self._read_held()

    def _retire(self, adapter: Adapter) -> None:
        """It is not served any more: what it holds goes with its last sequence."""
        if self._users[adapter.number]:
            return
        if adapter.number in self._copies:
            self._drop(adapter.number)
        self._known.pop(adapter.number, None)

    def _drop(self, number: int) -> None:
        del self._copies[number]
        self._require().drop(number)

    def _require(self) -> AdapterHolder:
        if self._holder is None:
            raise UnsupportedError(OFF)
        return self._holder

    def check(self) -> None:
        """Raise AssertionError unless copies and sequences agree."""
        if self._holder is None:
            return
        assert len(self._copies) <= self._holder.host_copies, "too many copies on the host"
        served = {adapter.number for adapter in self.served.values()}
        assert set(self._known) == served | set(self._users), "an adapter is kept for nobody, or was lost too early"
        for sequence in self._held:
            assert sequence.finish is None, f"{sequence.request.id} is held although it ended"


def _explained(adapter: Adapter, cause: BaseException) -> StokerError:
    """Why a folder could not be read; a defect of the reader costs the adapter, not the engine."""
    if isinstance(cause, StokerError):
        return RequestError(cause.message, param="lora_path")
    log.error("adapter %s broke its reader", adapter.name, exc_info=cause)
    return RequestError(f"{adapter.path}: it cannot be read: {type(cause).__name__}: {cause}", param="lora_path")
