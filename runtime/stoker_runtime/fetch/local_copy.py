"""A repository of the hub as a folder, or a GGUF file, on this machine.

    1. what `stoker fetch` published under that name     2. the user's hub cache
    3. the hub: what is missing, into that cache, verified

Invariants: a model that lies here whole takes no network; a cache that cannot tell whether it holds all of a
repository is completed from the hub, and served as it is when the hub cannot be asked.
Knows nothing of what serves the files.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stoker_runtime.checkpoint.safetensors_index import INDEX, SINGLE, checkpoint_files
from stoker_runtime.errors import ModelError
from stoker_runtime.fetch import manifest as manifests
from stoker_runtime.fetch.download import Downloader, Patience
from stoker_runtime.fetch.errors import FetchError, HubUnreachable
from stoker_runtime.fetch.hub.cache import HubCache
from stoker_runtime.fetch.hub.session import Session
from stoker_runtime.fetch.hub.source import Hub
from stoker_runtime.fetch.interrupt import stopped_by_signals
from stoker_runtime.fetch.order import Order
from stoker_runtime.fetch.prefetch import LOCK_SECONDS, Published, patient_listing, serve_path
from stoker_runtime.fetch.progress import Progress, Terminal, files, size
from stoker_runtime.fetch.reference import Reference
from stoker_runtime.fetch.select import EXPORTS, select
from stoker_runtime.fetch.source import SourceFile
from stoker_runtime.fetch.verify import check
from stoker_runtime.fetch.volume import DEFAULT_ROOT, Volume, os_errors
from stoker_runtime.models.config_source import read_json

_PARALLEL = 4

Say = Callable[[str], None]


class _Whole(Enum):
    """Whether the cache holds all that is needed of a commit; UNSURE: of files that the repository may have besides."""

    YES, UNSURE, NO = range(3)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Who follows a download, and what ends it."""

    progress: Progress
    stop: threading.Event
    terminal: Terminal


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """One repository to bring here: `only` names the globs of the files that are wanted, () for what a model needs."""

    reference: Reference
    revision: str
    only: tuple[str, ...]
    say: Say

    def path(self) -> Path:
        """Where the model lies, in the end. Raises FetchError."""
        published = self._published()
        if published is not None:
            return published
        with Session() as session:
            with session.errors(self.reference.place, self.revision):
                cache = HubCache(self.reference.place)
            commit = cache.commit(self.revision or "main")
            whole = self._whole(cache, commit) if commit else _Whole.NO
            if whole is _Whole.YES or (whole is _Whole.UNSURE and session.offline):
                return self._cached(cache, commit)
            try:
                return self._fetched(session, cache)
            except HubUnreachable as error:
                if whole is _Whole.NO:
                    raise
                self.say(f"{error.message} What the cache holds is served.")
                return self._cached(cache, commit)

    def _published(self) -> Path | None:
        """What `stoker fetch hf://NAME` published, if it is still whole."""
        volume = Volume(DEFAULT_ROOT.expanduser())
        uri = self.reference.text if self.reference.text.startswith("hf://") else f"hf://{self.reference.text}"
        known = volume.recall(Order(uri, volume.root).key(self.revision))
        if known is None:
            return None
        try:
            manifest = manifests.read(known[0])
        except FetchError:
            return None
        if check(known[0], manifest, full=False, progress=Progress(), stop=threading.Event()):
            return None
        self.say(f"{self.reference.text}: as published at {known[0]}, commit {manifest.resolved_revision[:12]}")
        return serve_path(Published(known[0], manifest, 0))

    def _whole(self, cache: HubCache, commit: str) -> _Whole:
        """Whether the files of a commit that lie in the cache are all that is wanted."""
        present = [file.name for file in cache.files(commit)]
        listed = cache.listed(commit)
        if listed is not None:
            return _Whole.YES if set(self._choose(listed)) <= set(present) else _Whole.NO
        try:
            chosen = self._choose(present)
        except FetchError:
            return _Whole.NO
        if self.reference.file or self.reference.quantization:
            return _Whole.YES
        if self.only:
            # A tokenizer is one file here; other descriptions of a model may stand in several.
            return _Whole.YES if "tokenizer.json" in chosen and "tokenizer*" in self.only else _Whole.UNSURE
        if any(name.endswith(".gguf") for name in chosen):
            return _Whole.UNSURE
        return _checkpoint(cache.snapshot(commit))

    def _choose(self, names: Sequence[str]) -> list[str]:
        only = self.only if "config.json" in names or "tokenizer.json" in names else ()
        reference = self.reference
        return select(
            names,
            file=reference.file,
            quantization=reference.quantization,
            allow=only,
            ignore=EXPORTS if only else (),
            where=reference.text,
        )

    def _cached(self, cache: HubCache, commit: str) -> Path:
        root = cache.snapshot(commit)
        self.say(f"{self.reference.text}: from the hub cache at {cache.root}, commit {commit[:12]}")
        return self._served(root, self._choose([file.name for file in cache.files(commit)]))

    def _served(self, root: Path, names: Sequence[str]) -> Path:
        """The folder, or the GGUF model in it."""
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        return root / ggufs[0] if ggufs and not any(name.endswith(".safetensors") for name in names) else root

    def _fetched(self, session: Session, cache: HubCache) -> Path:
        """Ask the hub, bring what is missing, and put it into the cache."""
        stop, progress, revision = threading.Event(), Progress(), self.revision or "main"
        with stopped_by_signals(stop), Terminal(progress, log=self.say) as terminal:
            hub = Hub(self.reference.place, session)
            if session.offline:
                hub.refuse_offline()
            listing = patient_listing(hub, revision, Patience(), stop, terminal.say)
            offered = {file.name: file for file in listing.files}
            chosen = self._choose(list(offered))
            missing = [offered[name] for name in chosen if cache.file(listing.revision, offered[name]) is None]
            if missing:
                with os_errors(cache.folder):
                    self._bring(hub, cache, listing.revision, missing, _Watch(progress, stop, terminal))
            elif not self.only:
                # A cache that cannot be written serves all the same.
                with suppress(OSError):
                    cache.publish(revision, listing.revision, {})
        return self._served(cache.snapshot(listing.revision), chosen)

    def _bring(self, hub: Hub, cache: HubCache, commit: str, missing: list[SourceFile], watch: _Watch) -> None:
        """Download, verify and publish files; another process that fetches the same is waited for."""
        cache.folder.mkdir(parents=True, exist_ok=True)
        volume = Volume(cache.folder)

        def waiting() -> None:
            watch.terminal.say(f"{self.reference.text}: another process is fetching it; waiting for it.")

        with volume.lock("stoker", seconds=LOCK_SECONDS, stop=watch.stop, waiting=waiting):
            missing = [file for file in missing if cache.file(commit, file) is None]
            entries: dict[str, tuple[SourceFile, Path | None]] = {file.name: (file, None) for file in missing}
            missing = [file for file in missing if cache.blob(file) is None]
            work = volume.work("stoker")
            downloader = Downloader(hub, work, watch.progress, Patience(), watch.stop)
            total, before = sum(file.size for file in missing), downloader.present(missing)
            volume.require(total - before)
            resumed = f", {size(before)} of it already here" if before else ""
            watch.terminal.say(
                f"{self.reference.text}: fetching {files(len(missing))}, {size(total)}{resumed}, commit {commit[:12]}, "
                f"into {cache.folder}"
            )
            fetched = downloader.fetch(missing, _PARALLEL)
            entries |= {file.name: (file, fetched[file.name][1]) for file in missing}
            # A part of a model does not take a branch's name from the whole one that has it.
            revision = self.revision or "main"
            cache.publish(commit if self.only and cache.commit(revision) else revision, commit, entries)
            shutil.rmtree(work, ignore_errors=True)


def _generates(architecture: object) -> bool:
    return str(architecture).endswith(("ForCausalLM", "LMHeadModel"))


def _checkpoint(folder: Path) -> _Whole:
    """Whether a folder of safetensors has all that a server needs."""
    try:
        named = {path.name for path in checkpoint_files(folder)} == {SINGLE} or (folder / INDEX).is_file()
        architectures = read_json(folder / "config.json").get("architectures")
    except ModelError:
        return _Whole.NO
    # Of models that pool, files in other folders say how: where there are none, it may be the cache that lacks them. So
    # it may lack weights that neither an index nor a name promises.
    generates = isinstance(architectures, list) and all(map(_generates, architectures))
    return _Whole.YES if named and generates and (folder / "tokenizer.json").is_file() else _Whole.UNSURE
