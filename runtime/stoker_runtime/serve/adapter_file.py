"""Follows a file that lists adapters (`--lora-modules-file`): what it names is served, what it no longer names is not.

    {"adapters": [{"name": "sql", "path": "/models/sha256-…", "digest": "sha256:…"}]}

So whoever writes the file need not reach this server, hold a key of it, or know when it started.
Invariants: one adapter that cannot be served keeps no other from it, and is tried again; an adapter gives way to
another of its name only when that one was read whole. With a digest, nothing is read of a folder that is not what was
published. A file that cannot be read changes nothing. Each of several API processes follows the file by itself.
Knows nothing of who writes the file, and of adapters that came otherwise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.errors import ConfigError, NotFoundError, RequestError, StokerError
from stoker_runtime.fetch.errors import FetchError
from stoker_runtime.fetch.progress import Progress
from stoker_runtime.fetch.verify import verify_only

CHECK_SECONDS = 1.0
"""How long a change of the file may go unseen."""
RETRY_SECONDS = 10.0
"""After this an adapter that could not be served is tried again."""
MOST = 256
_KEYS = {"name", "path", "digest"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """One adapter of the file; `digest` is what `stoker fetch` published the folder under, "" = it is not checked."""

    name: str
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an adapter is not served, in words, and what of them a program may go by; `due` is when it is tried again."""

    what: Listed
    reason: str
    message: str
    due: float


def read_list(path: Path) -> tuple[Listed, ...]:
    """The adapters that the file names. Raises ConfigError."""
    rule = 'it must be {"adapters": [{"name": NAME, "path": FOLDER, "digest": "sha256:…" or nothing}]}'
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        listed = tuple(_listed(each) for each in document["adapters"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="lora-modules-file") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no list of adapters; {rule}.", param="lora-modules-file") from error
    names = [each.name for each in listed]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice or len(names) > MOST:
        what = f"names {twice!r} twice" if twice else f"names {len(names)} adapters, and {MOST} are the most"
        raise ConfigError(f"{path} {what}.", param="lora-modules-file")
    return listed


def _listed(raw: Any) -> Listed:
    texts = {key: str(raw[key]) for key in raw}
    if not set(texts) <= _KEYS or not texts.get("name") or not texts.get("path"):
        raise ValueError(raw)
    return Listed(**texts)


class AdapterFile:
    """The file at `path`. `start` takes up what it names, `run` follows it."""

    def __init__(self, path: str, model_names: Sequence[str]) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self.problem = ""
        """What is wrong with the file as it is now; "" = nothing."""
        self._path = Path(path)
        self._model_names = tuple(model_names)
        self._stamp = self._stamped()
        self._wanted = read_list(self._path)
        self._engine: EngineClient | None = None
        self._served: dict[str, Listed] = {}
        self._failed: dict[str, _Failure] = {}

    def reports(self) -> list[Mapping[str, str]]:
        """What each adapter of the file is: `loaded`, `loading`, or `refused` with why. Names the file's digest."""
        found: list[Mapping[str, str]] = []
        for each in self._wanted:
            failure = self._failed.get(each.name)
            if self._is_served(each):
                found.append({"name": each.name, "digest": each.digest, "state": "loaded"})
            elif failure is not None and failure.what == each:
                words = {"state": "refused", "reason": failure.reason, "message": failure.message}
                found.append({"name": each.name, "digest": each.digest, **words})
            else:
                found.append({"name": each.name, "digest": each.digest, "state": "loading"})
        return found

    async def start(self, engine: EngineClient) -> None:
        """Serve what the file names, as far as that can be served."""
        self._engine = engine
        await self._serve_listed()

    async def run(self) -> None:
        """Follow the file, for ever."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._read()
            await self._serve_listed()

    def _read(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._wanted, self.problem = read_list(self._path), ""
        except ConfigError as error:
            self.problem = f"{error.message} The adapters that are served stay."
            log.error("%s", self.problem)

    async def _serve_listed(self) -> None:
        """Load what is not served yet and due, then unload what is not wanted."""
        for each in self._wanted:
            failure = self._failed.get(each.name)
            waits = failure is not None and failure.what == each and time.monotonic() < failure.due
            if not self._is_served(each) and not waits:
                await self._load(each)
        names = {each.name for each in self._wanted}
        for name in [name for name in self._served if name not in names]:
            await self._unload(name)
        self._failed = {name: failure for name, failure in self._failed.items() if name in names}

    async def _load(self, each: Listed) -> None:
        engine = self._require()
        try:
            if each.name in self._model_names:
                raise RequestError(f"{each.name!r} is the model's own name.")
            if each.digest:
                await asyncio.to_thread(_verify, each)
            await engine.load_adapter(each.name, each.path, replace=True)
        except StokerError as error:
            if error.param != "lora_name":  # else it is being loaded by another process, which will have told us
                self._fail(each, error)
            return
        self._failed.pop(each.name, None)
        self._served[each.name] = each

    def _fail(self, each: Listed, error: StokerError) -> None:
        reason = error.reason if isinstance(error, FetchError) else "NotServed"
        before = self._failed.get(each.name)
        if before is None or (before.what, before.message) != (each, error.message):
            log.error("adapter %s is not served: %s", each.name, error.message)
        self._failed[each.name] = _Failure(each, reason, error.message, time.monotonic() + RETRY_SECONDS)

    async def _unload(self, name: str) -> None:
        listed = self._served[name]
        served = self._require().adapters.get(name)
        try:
            if served is not None and served.path == listed.path:
                await self._require().unload_adapter(name)
        except NotFoundError:
            pass  # another process was first
        except StokerError as error:
            log.error("adapter %s is served on: %s", name, error.message)
            return
        del self._served[name]

    def _is_served(self, each: Listed) -> bool:
        """Whether the engine serves it from this folder: for this process, or for another one that follows the file."""
        if self._engine is None:
            return False
        there = self._engine.adapters.get(each.name)
        if there is None or there.path != each.path:
            return False
        self._served[each.name] = each
        return True

    def _require(self) -> EngineClient:
        if self._engine is None:
            raise RuntimeError("there is no engine yet")
        return self._engine

    def _stamped(self) -> tuple[int, ...]:
        """What changes with the file, also where a mounted ConfigMap is swapped under a symbolic link."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size


def _verify(each: Listed) -> None:
    """Raise FetchError unless the folder is what was published under its digest."""
    verify_only(Path(each.path), each.digest, full=False, progress=Progress(), stop=threading.Event())
