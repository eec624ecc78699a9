"""`stoker fetch`: flags → order → exit status and termination message.

Invariants: the token comes from HF_TOKEN and is never printed; whatever happens, the termination message is
one JSON object of at most 4 KiB; the one line on stdout is the path for `stoker serve`, or what was resolved. Every
pod checks its weights before its engine starts: what only a fetch needs is imported by a fetch.
Knows nothing of how a fetch works.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker_runtime.fetch.bundle import ENDING, write_bundle
from stoker_runtime.fetch.download import Patience
from stoker_runtime.fetch.errors import BadRequest, FetchError, FetchFailed
from stoker_runtime.fetch.interrupt import stopped_by_signals
from stoker_runtime.fetch.progress import Progress, ProgressServer, Terminal, files, size
from stoker_runtime.fetch.verify import verify_only
from stoker_runtime.fetch.volume import DEFAULT_ROOT

if TYPE_CHECKING:
    from stoker_runtime.fetch.order import Order
    from stoker_runtime.fetch.prefetch import Published

# What Kubernetes keeps of a termination message.
_MESSAGE_BYTES = 4096


def main(argv: list[str]) -> int:
    """Run `stoker fetch`; returns the exit status that `errors.py` lists, 2 for a wrong command line."""
    options = _options(argv)
    progress, stop = Progress(), threading.Event()
    try:
        with ExitStack() as stack:
            stack.enter_context(stopped_by_signals(stop))
            terminal = stack.enter_context(Terminal(progress))
            if options.progress_port is not None:
                stack.enter_context(_serving(progress, options))
            run = _verify if options.verify_only else _look if options.in_place else _fetch
            run = _resolve if options.resolve else _look_into if options.resolve_image else run
            result = run(options, progress, stop, terminal)
    except FetchError as error:
        sys.stderr.write(f"stoker fetch: {error.reason}: {error.message}\n")
        _leave(options.termination_log, {"reason": error.reason, "message": error.message})
        # A volume that fails its check fails it again until somebody repairs it.
        checks = options.verify_only or (options.in_place and options.digest)
        return 3 if checks and error.exit_status == 1 else error.exit_status
    _leave(options.termination_log, result)
    return 0


Result = dict[str, Any]


def _fetch(options: argparse.Namespace, progress: Progress, stop: threading.Event, terminal: Terminal) -> Result:
    from stoker_runtime.fetch.prefetch import Prefetch, serve_path
    from stoker_runtime.fetch.report.shape import shape_of

    order = _order(options)
    started = time.monotonic()
    patience = Patience(failures=options.retries, min_bytes_per_second=options.min_rate_kib * 1024.0)
    published = Prefetch(order, progress, stop, terminal.say, patience).run()
    seconds = time.monotonic() - started
    manifest, serve = published.manifest, serve_path(published)
    did = f"{size(published.moved)} fetched and verified" if published.moved else "already here and unchanged"
    terminal.say(f"{files(len(manifest.files))}, {size(manifest.bytes)}, {did} in {seconds:.1f} s.")
    if options.bundle is not None:
        write_bundle(published.folder, manifest, options.bundle, progress, stop)
        terminal.say(f"{options.bundle}: {manifest.digest}. Where it is carried to: stoker fetch file://PATH")
    below, shape = _below(published.folder, serve), shape_of(serve)
    if options.image is not None:
        _write_image(published, {"serve": below, "shape": shape}, options.image, progress, stop, terminal)
    sys.stdout.write(f"{options.image or options.bundle or serve}\n")
    return {
        "resolvedRevision": manifest.resolved_revision,
        "digest": manifest.digest,
        "bytes": manifest.bytes,
        "path": published.folder.name,
        "serve": serve.relative_to(order.dest).as_posix(),
        "shape": shape,
    }


def _write_image(
    published: Published, told: Result, image: Path, progress: Progress, stop: threading.Event, terminal: Terminal
) -> None:
    from stoker_runtime.fetch.registry.layout import write_image

    digest = write_image(published.folder, published.manifest, told, image, progress, stop)
    terminal.say(f"{image}: image {digest}. To push it: crane push {image} REGISTRY/NAME:TAG")


def _verify(options: argparse.Namespace, progress: Progress, stop: threading.Event, terminal: Terminal) -> Result:
    started = time.monotonic()
    manifest = verify_only(options.path, options.digest, full=options.full, progress=progress, stop=stop)
    seconds = time.monotonic() - started
    count = f"{files(len(manifest.files))}, {size(manifest.bytes)}"
    terminal.say(f"{options.path}: {count}, verified in {seconds:.1f} s.")
    return {
        "resolvedRevision": manifest.resolved_revision,
        "digest": manifest.digest,
        "bytes": manifest.bytes,
    }


def _look(options: argparse.Namespace, progress: Progress, stop: threading.Event, terminal: Terminal) -> Result:
    from stoker_runtime.fetch.prefetch import in_place, serve_path
    from stoker_runtime.fetch.report.shape import shape_of

    started = time.monotonic()
    found = in_place(_order(options), options.digest, progress=progress, stop=stop)
    seconds = time.monotonic() - started
    manifest, serve = found.manifest, serve_path(found)
    terminal.say(f"{files(len(manifest.files))}, {size(manifest.bytes)}, hashed where they lie in {seconds:.1f} s.")
    sys.stdout.write(f"{serve}\n")
    root = options.root or found.folder
    return {
        "resolvedRevision": manifest.resolved_revision,
        "digest": manifest.digest,
        "bytes": manifest.bytes,
        "path": _below(root, found.folder),
        "serve": _below(root, serve),
        "shape": shape_of(serve),
    }


def _resolve(options: argparse.Namespace, progress: Progress, stop: threading.Event, terminal: Terminal) -> Result:
    from stoker_runtime.fetch.prefetch import look_up

    del progress
    found = look_up(_order(options), patience=Patience(failures=options.retries), stop=stop, say=terminal.say)
    total = sum(max(file.size, 0) for file in found.files)
    terminal.say(f"{found.revision}: {files(len(found.files))}, {size(total)}; nothing was fetched.")
    sys.stdout.write(f"{found.revision}\n")
    # As a fetch reports, of which nothing is known that takes the bytes.
    return {"resolvedRevision": found.revision, "digest": "", "bytes": total, "path": "", "serve": ""}


def _look_into(options: argparse.Namespace, progress: Progress, stop: threading.Event, terminal: Terminal) -> Result:
    from stoker_runtime.fetch.prefetch import look_into_image

    del progress
    found = look_into_image(_order(options), patience=Patience(failures=options.retries), stop=stop, say=terminal.say)
    told = "its model" if found.shape else "its layers; it does not tell its model's shape"
    terminal.say(f"{found.digest}: {size(found.bytes)} of {told}; nothing was fetched.")
    sys.stdout.write(f"{found.digest}\n")
    report = {"resolvedRevision": found.digest, "digest": found.digest, "bytes": found.bytes, "path": ""}
    return {**report, "serve": found.serve, "shape": dict(found.shape)}


def _below(root: Path, path: Path) -> str:
    """`path` relative to `root`; "" for `root` itself."""
    return "" if path == root else path.relative_to(root).as_posix()


def _order(options: argparse.Namespace) -> Order:
    from stoker_runtime.fetch.order import Order, endpoint_for

    uri = options.uri or options.uri_flag
    pins = {}
    for text in options.sha256:
        name, separator, digest = text.rpartition("=")
        if not separator or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise BadRequest(f"--sha256 {text!r} must be FILE=HEX with 64 hex digits.")
        pins[name] = digest.lower()
    return Order(
        uri=uri,
        dest=options.dest.expanduser().absolute(),
        revision=options.revision,
        endpoint=endpoint_for(uri, options.endpoint),
        token=os.environ.get("HF_TOKEN", "").strip(),
        send_token=options.send_token,
        allow=tuple(options.allow),
        ignore=tuple(options.ignore),
        sha256=pins,
        mount_root=options.mount_root,
        parallel=options.parallel,
        refresh=options.refresh,
        repair=options.repair,
        digest=options.digest,
        most_bytes=options.max_bytes,
    )


def _options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; a combination that says nothing is a usage error."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.verify_only and options.path is None:
        parser.error("--verify-only needs --path")
    if not options.verify_only and (options.path is not None or options.full):
        parser.error("--path and --full belong to --verify-only")
    if options.verify_only and options.in_place:
        parser.error("give one of --verify-only and --in-place")
    asks = options.resolve or options.resolve_image
    if asks and (options.verify_only or options.in_place or options.repair or options.refresh):
        parser.error(
            "--resolve and --resolve-image fetch nothing; leave --verify-only, --in-place, --repair and --refresh out"
        )
    checks = options.verify_only or options.in_place
    for flag in ("bundle", "image"):
        if getattr(options, flag) is not None and (checks or asks):
            parser.error(f"--{flag} writes what is fetched; leave --verify-only, --in-place and --resolve out")
    if options.bundle is not None and not options.bundle.name.endswith(ENDING):
        parser.error(f"--bundle {options.bundle} must end in {ENDING}, by which a fetch knows a bundle")
    if options.digest and not checks and not re.fullmatch(r"sha256:[0-9a-f]{64}", options.digest):
        parser.error(f"--digest {options.digest!r} must be sha256: and 64 hex digits")
    if options.root is not None and not options.in_place:
        parser.error("--root belongs to --in-place")
    if not options.verify_only and bool(options.uri) == bool(options.uri_flag):
        parser.error("give one URI")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stoker fetch",
        description="Fetch a model once: resolve its revision, download what is missing, verify every file, "
        "publish atomically. Prints the path for `stoker serve`. HF_TOKEN holds a private model's token; stores take "
        "their own variables, registries docker's login.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    uris = (
        "hf://ORG/REPO[/FILE.gguf|:Q4_K_M], modelscope://… (the same), s3://BUCKET/PREFIX[/FILE.gguf] (so gs://, "
        "az://), oci://REGISTRY/NAME:TAG, https://…, file:///PATH or pvc://CLAIM/PATH"
    )
    add("uri", nargs="?", default="", help=uris)
    add("--uri", dest="uri_flag", metavar="URI", default="", help="the same, as a flag")
    add("--revision", default="", help="branch, tag or commit (default: main)")
    add("--dest", type=Path, default=DEFAULT_ROOT, help="where to publish (default: %(default)s)")
    server = "the hub, or the server of a store or registry (default: HF_ENDPOINT, AWS_ENDPOINT_URL and so on)"
    add(
        "--bundle",
        type=Path,
        metavar="FILE.tar",
        help="write it to this one file, too, for `stoker fetch file://FILE.tar`",
    )
    add("--image", type=Path, metavar="DIR", help="write it as an image, too, in the OCI layout, for pods to mount")
    add("--endpoint", default="", metavar="URL", help=server)
    add("--send-token", action="store_true", help="send HF_TOKEN to the server of an https:// file too")
    add("--allow", action="append", default=[], metavar="GLOB", help="fetch only these; may be repeated")
    add("--ignore", action="append", default=[], metavar="GLOB", help="leave these out; may be repeated")
    add("--sha256", action="append", default=[], metavar="FILE=HEX", help="demand this digest; repeatable")
    add("--digest", default="", metavar="sha256:HEX", help="demand this digest of the whole; what has it is taken")
    add("--max-bytes", type=_positive, default=0, metavar="N", help="refuse a model of more bytes (default: any)")
    add("--mount-root", type=Path, default=Path("/source"), help="pvc://CLAIM is DIR/CLAIM (%(default)s)")
    add("--refresh", action="store_true", help="look a branch up again although it was fetched before")
    add("--repair", action="store_true", help="hash what is published, fetch again what differs")
    add("--resolve", action="store_true", help="print what the revision stands for now, and fetch nothing")
    image = "print the digest of an image with a model in it, for pods to mount, and fetch nothing"
    add("--resolve-image", action="store_true", help=image)
    add("--parallel", type=_positive, default=4, metavar="N", help="files at a time (default: %(default)s)")
    add("--retries", type=_positive, default=6, metavar="N", help="failures in a row (default: %(default)s)")
    rate = "give up when slower than this per second on the whole (default: %(default)s)"
    add("--min-rate-kib", type=_positive, default=512, metavar="KIB", help=rate)
    add("--progress-port", type=int, metavar="PORT", help="serve GET /progress as JSON; 0 picks a port")
    add("--progress-host", default="0.0.0.0", metavar="HOST", help="its address (default: %(default)s)")
    add("--termination-log", type=Path, metavar="FILE", help="write the result or the failure there as JSON")
    look = parser.add_argument_group("weights that are served where they lie (file://, pvc://)")
    look.add_argument("--in-place", action="store_true", help="hash the files and report; copy and write nothing")
    look.add_argument("--root", type=Path, metavar="DIR", help="report paths relative to this (default: the folder)")
    verify = parser.add_argument_group("checking a published folder, without writing to it")
    verify.add_argument("--verify-only", action="store_true", help="check and fetch nothing")
    verify.add_argument("--path", type=Path, help="the published folder")
    verify.add_argument("--full", action="store_true", help="hash all files, not only those whose time changed")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _serving(progress: Progress, options: argparse.Namespace) -> ProgressServer:
    try:
        return ProgressServer(progress, options.progress_host, options.progress_port)
    except OSError as error:
        raise FetchFailed(f"--progress-port {options.progress_port}: {error.strerror}.") from None


def _leave(path: Path | None, document: dict[str, Any]) -> None:
    """Write the termination message, cut to what Kubernetes keeps."""
    if path is None:
        return
    if len(str(document.get("message", ""))) > 1000:
        document = {**document, "message": document["message"][:1000] + "…"}
    text = json.dumps(document, ensure_ascii=False)
    try:
        path.write_bytes(text.encode()[:_MESSAGE_BYTES])
    except OSError as error:
        sys.stderr.write(f"stoker fetch: the termination message {path} cannot be written: {error.strerror}\n")
