"""One order carried out: a model's files, verified, in a published folder.

Invariants: whoever finds the published folder finds all of it; an order that was carried out before and is
still whole takes no network; two fetchers of one source on one volume do the work once.
Knows nothing of flags, signals and exit statuses.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stoker_runtime.fetch import manifest as manifests
from stoker_runtime.fetch.download import Downloader, Patience
from stoker_runtime.fetch.errors import (
    BadRequest,
    ChecksumMismatch,
    FetchFailed,
    Interrupted,
    NotPublished,
    VolumeFull,
)
from stoker_runtime.fetch.folder import Folder
from stoker_runtime.fetch.manifest import Manifest
from stoker_runtime.fetch.order import Order, opened
from stoker_runtime.fetch.progress import Progress, files, size
from stoker_runtime.fetch.reference import MOVING, STORES, Reference, parse
from stoker_runtime.fetch.select import EXPORTS, select
from stoker_runtime.fetch.source import Listing, Source, SourceFile, Transient
from stoker_runtime.fetch.verify import check, hash_file
from stoker_runtime.fetch.volume import Volume

Answer = TypeVar("Answer")

if TYPE_CHECKING:
    from stoker_runtime.fetch.registry.image import ModelImage

# Another fetcher may be downloading all of a large model; the Job's own deadline ends a wait that is longer
# than it allows.
LOCK_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Published:
    """A fetched model: its folder, its manifest, and how many bytes had to move."""

    folder: Path
    manifest: Manifest
    moved: int


class Prefetch:
    """One run of one order. `say` gets a sentence for people now and then."""

    def __init__(
        self,
        order: Order,
        progress: Progress,
        stop: threading.Event,
        say: Callable[[str], None],
        patience: Patience,
    ) -> None:
        self._order = order
        self._reference = parse(order.uri)
        self._progress = progress
        self._stop = stop
        self._say = say
        self._patience = patience
        self._volume = Volume(order.dest)

    def run(self) -> Published:
        """Answer the order. Raises FetchError.

        1. lock the source  2. take what an earlier run published  3. resolve and list  4. select
        5. check the room   6. download and verify                 7. publish
        """
        key = hashlib.sha256(self._order.uri.encode()).hexdigest()[:16]
        self._volume.prepare()
        with (
            opened(self._order, self._reference) as source,
            self._volume.lock(key, seconds=LOCK_SECONDS, stop=self._stop, waiting=self._waiting),
        ):
            return self._present(self._order.digest) or self._answered(source, key) or self._fetch(source, key)

    def _present(self, digest: str) -> Published | None:
        """What is published here with this very digest, whichever source it came from; "" = none is known."""
        folder = self._volume.root / digest.replace(":", "-")
        if not digest or self._order.repair:
            return None
        try:
            manifest = manifests.read(folder)
        except (NotPublished, ChecksumMismatch):
            return None
        whole = not check(folder, manifest, full=False, progress=self._progress, stop=self._stop)
        return Published(folder, manifest, 0) if whole and manifest.digest == digest else None

    def _answered(self, source: Source, key: str) -> Published | None:
        """The folder an earlier run published for this order, mended where a file is damaged; None when
        there is none.
        """
        known = None if self._order.refresh else self._volume.recall(self._order.key(self._order.revision))
        if known is None or (source.local and known[1] != _pin(self._list(source, self._order.revision))):
            return None
        folder = known[0]
        try:
            manifest = manifests.read(folder)
        except (NotPublished, ChecksumMismatch) as error:
            self._say(f"{error.message} Fetching it again.")
            return None
        if self._order.digest not in ("", manifest.digest):
            return None
        bad = check(folder, manifest, full=self._order.repair, progress=self._progress, stop=self._stop)
        if not bad:
            return Published(folder, manifest, 0)
        for name, problem in bad.items():
            self._say(f"{folder.name}/{name} {problem}; fetching it again.")
        return self._repair(source, key, folder, manifest, list(bad))

    def _repair(self, source: Source, key: str, folder: Path, manifest: Manifest, bad: list[str]) -> Published:
        """Fetch only `bad`, and put them in the place of the damaged ones."""
        revision = manifest.resolved_revision if self._reference.scheme in ("hf", "oci") else self._order.revision
        offered = {file.name: file for file in self._list(source, revision).files}
        gone = [name for name in bad if name not in offered]
        if gone:
            raise ChecksumMismatch(f"{folder.name}/{gone[0]} is damaged, and {self._order.uri} has it no longer.")
        wanted = [replace(offered[name], sha256=manifest.files[name].sha256) for name in bad]
        fetched = self._download(source, key, wanted)
        entries = {**manifest.files, **{name: entry for name, (entry, _) in fetched.items()}}
        mended = Manifest(manifest.uri, manifest.resolved_revision, entries)
        self._volume.replace(folder, mended, {name: path for name, (_, path) in fetched.items()})
        return Published(folder, mended, sum(file.size for file in wanted))

    def _fetch(self, source: Source, key: str) -> Published:
        """Resolve, select, download, publish."""
        listing = self._list(source, self._order.revision)
        wanted = choose(self._order, self._reference, listing)
        promised = _promised(wanted) or self._of_commit(listing)
        self._demanded(promised)
        there = self._present(promised)
        if there is not None:
            self._remember(listing, there)
            return replace(there, manifest=replace(there.manifest, resolved_revision=listing.revision or promised))
        before = Downloader(source, self._volume.work(key), self._progress, self._patience, self._stop).present(wanted)
        self._say(_announce(self._reference.text, listing.revision, wanted, before))
        fetched = self._download(source, key, wanted)
        entries = {name: entry for name, (entry, _) in fetched.items()}
        manifest = Manifest(self._reference.text, listing.revision, entries)
        manifest = replace(manifest, resolved_revision=listing.revision or manifest.digest)
        self._demanded(manifest.digest)
        self._bounded(manifest.bytes)
        self._progress.enter("publish")
        folder = self._volume.publish(key, manifest, {name: path for name, (_, path) in fetched.items()})
        published = Published(folder, manifest, manifest.bytes - before)
        self._remember(listing, published, _pin(listing) if source.local else "")
        return published

    def _of_commit(self, listing: Listing) -> str:
        """The digest that an earlier run found for this very commit, under whichever name; "" where none did."""
        names_all = listing.revision and self._reference.scheme in (*MOVING, "modelscope")
        known = self._volume.recall(self._order.key(listing.revision)) if names_all else None
        return known[0].name.replace("-", ":", 1) if known else ""

    def _remember(self, listing: Listing, published: Published, pin: str = "") -> None:
        """Note what answers this order, for the next run."""
        for revision in {self._order.revision, listing.revision or published.manifest.digest}:
            self._volume.remember(self._order.key(revision), published.folder, pin)

    def _demanded(self, digest: str) -> None:
        """Raise ChecksumMismatch when a digest is demanded and this, unless it is "", is another."""
        if digest and self._order.digest not in ("", digest):
            raise ChecksumMismatch(f"{self._reference.text} is {digest} now, not {self._order.digest}.")

    def _download(
        self, source: Source, key: str, wanted: list[SourceFile]
    ) -> dict[str, tuple[manifests.ManifestFile, Path]]:
        downloader = Downloader(source, self._volume.work(key), self._progress, self._patience, self._stop)
        total = sum(max(file.size, 0) for file in wanted)
        self._bounded(total)
        self._volume.require(total - downloader.present(wanted))
        return downloader.fetch(wanted, self._order.parallel)

    def _bounded(self, count: int) -> None:
        most = self._order.most_bytes
        if most and count > most:
            raise VolumeFull(f"The model has {size(count)}; there is room for {size(most)} here.")

    def _list(self, source: Source, revision: str) -> Listing:
        return patient_listing(source, revision, self._patience, self._stop, self._say)

    def _waiting(self) -> None:
        self._say("Another fetch of the same model is running on this volume; waiting for it.")


def patient_listing(
    source: Source, revision: str, patience: Patience, stop: threading.Event, say: Callable[[str], None]
) -> Listing:
    """A source's listing, asked for again while that may help. Raises FetchError."""
    return _patiently(lambda: source.listing(revision), patience, stop, say)


def _patiently(
    ask: Callable[[], Answer], patience: Patience, stop: threading.Event, say: Callable[[str], None]
) -> Answer:
    """A source's answer, asked for again while that may help. Raises FetchError."""
    failures = 0
    while True:
        try:
            return ask()
        except Transient as trouble:
            failures += 1
            if failures >= patience.failures:
                raise trouble.error from None
            say(f"{trouble} Trying again.")
            if stop.wait(patience.wait(failures, trouble.after)):
                raise Interrupted("Stopped while the source was not answering.") from None


def choose(order: Order, reference: Reference, listing: Listing) -> list[SourceFile]:
    """The files that an order means, with its digests pinned on them. Raises FetchError."""
    offered = {file.name: file for file in listing.files}
    names = list(offered)
    whole = reference.bundle and not (order.allow or order.ignore)  # it was chosen when the bundle was made
    if not whole and (reference.scheme in ("hf", "modelscope", "oci", *STORES) or len(offered) > 1):
        only = order.only if "config.json" in offered and not reference.file else ()
        names = select(
            names,
            file=reference.file,
            quantization=reference.quantization,
            allow=order.allow or only,
            ignore=order.ignore or (EXPORTS if only else ()),
            where=reference.text,
        )
    unknown = [name for name in order.sha256 if name not in names]
    if unknown:
        raise BadRequest(
            f"A sha256 is given for {unknown[0]!r}, which is not among the files to fetch: {', '.join(names[:8])}."
        )
    return [_pinned(offered[name], order.sha256.get(name, "")) for name in names]


def look_up(order: Order, *, patience: Patience, stop: threading.Event, say: Callable[[str], None]) -> Listing:
    """What the revision of an order stands for now, and the files of it that a fetch would bring; none is brought.

    Raises BadRequest for a source without revisions, FetchError.
    """
    reference = parse(order.uri)
    if reference.scheme not in MOVING:
        raise BadRequest(f"{reference.text} has no revision to look up; only {', '.join(MOVING)} sources have one.")
    with opened(order, reference) as source:
        listing = patient_listing(source, order.revision, patience, stop, say)
    return Listing(listing.revision, tuple(choose(order, reference, listing)))


def look_into_image(
    order: Order, *, patience: Patience, stop: threading.Event, say: Callable[[str], None]
) -> ModelImage:
    """What an image that pods are to mount says of its model. Raises BadRequest for what is no image, FetchError."""
    from stoker_runtime.fetch.registry.image import look_into

    reference = parse(order.uri)
    if reference.scheme != "oci":
        raise BadRequest(f"{reference.text} is no image of a registry; write it as oci://REGISTRY/NAME:TAG.")
    return _patiently(lambda: look_into(reference, order.endpoint, order.revision), patience, stop, say)


def in_place(order: Order, digest: str, *, progress: Progress, stop: threading.Event) -> Published:
    """Hash the files of a file:// or pvc:// order where they lie; nothing is copied and nothing is written.

    Raises ChecksumMismatch when they are not those of `digest` (unless that is ""), or a file is not as pinned.
    """
    reference = parse(order.uri)
    if reference.scheme not in ("file", "pvc"):
        raise BadRequest(f"{order.uri} cannot be served in place; only file:// and pvc:// sources can.")
    if reference.bundle:
        raise BadRequest(f"{order.uri} is a bundle, which is not served where it lies; cache.mode PVC unpacks it.")
    listing = Folder(reference, order.mount_root).listing("")
    chosen = choose(order, reference, listing)
    progress.enter("verify", sum(file.size for file in chosen))
    entries = {}
    for file in chosen:
        path = Path(file.place)
        try:
            found, written = hash_file(path, progress, stop), path.stat().st_mtime_ns
        except OSError as error:
            raise FetchFailed(f"{path} cannot be read: {error.strerror}.") from None
        if file.sha256 and found != file.sha256:
            raise ChecksumMismatch(f"{file.name} has sha256 {found}, the order asks for {file.sha256}.")
        entries[file.name] = manifests.ManifestFile(found, file.size, written)
    manifest = Manifest(order.uri, "", entries)
    manifest = replace(manifest, resolved_revision=manifest.digest)
    if digest and manifest.digest != digest:
        raise ChecksumMismatch(f"{order.uri} holds {manifest.digest}, not {digest}: its files were changed.")
    first = Path(chosen[0].place)
    folder = first.parents[len(Path(chosen[0].name).parts) - 1]
    return Published(folder, manifest, 0)


def serve_path(published: Published) -> Path:
    """What `stoker serve` is given: the folder, or the one GGUF model in it (the first part of a split
    one).
    """
    ggufs = sorted(name for name in published.manifest.files if name.endswith(".gguf"))
    if ggufs and not any(name.endswith(".safetensors") for name in published.manifest.files):
        return published.folder / ggufs[0]
    return published.folder


def _promised(wanted: list[SourceFile]) -> str:
    """The digest that a source promises for these files; "" where it does not tell that of each."""
    if not all(file.sha256 for file in wanted):
        return ""
    return Manifest("", "", {file.name: manifests.ManifestFile(file.sha256, file.size, 0) for file in wanted}).digest


def _pinned(file: SourceFile, sha256: str) -> SourceFile:
    if not sha256:
        return file
    if file.sha256 and file.sha256 != sha256:
        raise ChecksumMismatch(f"{file.name}: the source has sha256 {file.sha256}, the order asks for {sha256}.")
    return replace(file, sha256=sha256)


def _pin(listing: Listing) -> str:
    """Identifies the state of a folder, which has no commits."""
    text = "\n".join(f"{file.name} {file.version}" for file in sorted(listing.files, key=lambda file: file.name))
    return hashlib.sha256(text.encode()).hexdigest()


def _announce(uri: str, revision: str, wanted: list[SourceFile], before: int) -> str:
    total = sum(max(file.size, 0) for file in wanted)
    at = f" at {revision[:12]}" if revision else ""
    resumed = f", {size(before)} of it already here" if before else ""
    return f"{uri}{at}: {files(len(wanted))}, {size(total)}{resumed}."
