"""What each verb does: its flags, and the few lines that bring its parts together.

Invariants: a verb that changes something says what it changed; every other one only reads.
Knows nothing of how the parts work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from stoker_operator.local.manifest import ManifestError, load
from stoker_operator.plugin import canary as canaries
from stoker_operator.plugin import fit as fits
from stoker_operator.plugin import rollback as rollbacks
from stoker_operator.plugin import sleep as sleeps
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.facts import facts_of
from stoker_operator.plugin.forward import api_key, forwarded, run
from stoker_operator.plugin.kubectl import Kubectl
from stoker_operator.plugin.logs import choose, is_noise
from stoker_operator.plugin.place import RESOURCE, ClusterPlace, Place, UpPlace, ready_of
from stoker_operator.plugin.presets import Preset, catalog, named
from stoker_operator.plugin.render import render as rendered
from stoker_operator.plugin.screen import overview, screen, table
from stoker_operator.settings import SettingsError, from_arguments
from stoker_operator.spec.service import WISH, InferenceService, parse

Options = argparse.Namespace
Parser = argparse.ArgumentParser
# Verbs that hand on what follows `--`.
PASSING_ON = ("chat", "bench", "render")
_WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[J"


def place_of(options: Options) -> Place:
    """The cluster, or the `stoker up`, that is meant."""
    return UpPlace(options.data.expanduser()) if options.up else ClusterPlace(Kubectl.of(options))


def show(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def status_flags(parser: Parser) -> None:
    """Flags of `status`."""
    parser.add_argument("name", nargs="?", default="", help="the service; without it every one of the namespace")
    parser.add_argument("-w", "--watch", action="store_true", help="show it again and again, until it is Ready")


def status(options: Options) -> int:
    """One screen; with --watch until the service is Ready."""
    place = place_of(options)
    while True:
        if not options.name:
            services = place.services()
            show(overview(services, datetime.now(UTC)) if services else ["no services here"])
            return 0
        service = place.service(options.name)
        url = str(place.record(options.name)["url"]) if isinstance(place, UpPlace) else ""
        lines = list(screen(service, place.pods(service), place.events(service), datetime.now(UTC), url))
        if options.watch and sys.stdout.isatty():
            sys.stdout.write(_CLEAR)
        show(lines)
        if not options.watch or ready_of(service)["status"] == "True":
            return 0
        time.sleep(_WATCH_SECONDS)


def logs_flags(parser: Parser) -> None:
    """Flags of `logs`."""
    parser.add_argument("name", help="the service")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines come (of the first log chosen)")
    parser.add_argument("--tail", type=int, default=50, metavar="N", help="lines of each log (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="lines of probes and scrapes too")


def logs(options: Options) -> int:
    """The logs chosen, each under a line that names it. Raises PluginError where nothing has begun."""
    place = place_of(options)
    service = place.service(options.name)
    chosen = choose(service, place.pods(service))
    if not chosen:
        ready = ready_of(service)
        raise PluginError(f"no container has begun yet. {ready['reason']}: {ready['message']}")
    for log in chosen[: 1 if options.follow else None]:
        before = " before its last restart" if log.previous else ""
        sys.stderr.write(f"--- {log.pod}, container {log.container}{before}\n")
        sys.stderr.flush()
        for line in place.log(log, tail=options.tail, follow=options.follow):
            if options.all or not is_noise(line):
                sys.stdout.write(line)
                sys.stdout.flush()
    return 0


def _source_flags(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", default="", help="a service of the cluster, or of --up")
    parser.add_argument("-f", "--file", type=Path, action="append", help="a manifest in its place; may be repeated")
    taken = "what the weights take as model.quantization makes them, such as 15Gi"
    parser.add_argument("--weights", default="", metavar="QUANTITY", help=taken)
    shape = "layers=28,kvHeads=4,headDim=128,maxContext=32768"
    parser.add_argument("--shape", default="", metavar="FACTS", help=f"the model's shape, such as {shape}")


def _sources(options: Options) -> list[InferenceService]:
    """The services of the files, else the one that is named. Raises PluginError."""
    if bool(options.file) == bool(options.name):
        raise PluginError("give the name of a service, or -f FILE.")
    documents = [_read(options)] if options.name else _load(options.file)
    return [parse(document) for document in documents]


def _read(options: Options) -> dict[str, Any]:
    return place_of(options).service(options.name)


def _load(files: list[Path]) -> list[dict[str, Any]]:
    try:
        return load(files).services
    except ManifestError as error:
        raise PluginError(str(error)) from None


def fit_flags(parser: Parser) -> None:
    """Flags of `fit`."""
    _source_flags(parser)


def fit(options: Options) -> int:
    """The verdict and the table; 1 where it does not fit the GPUs that the spec names."""
    failed = False
    for service in _sources(options):
        model = facts_of(service, catalog(), options.weights, options.shape)
        show(fits.report(service, model))
        products = service.resources.gpu_products
        failed = failed or bool(products and fits.on(service, model, products).verdict == "TooLarge")
    return int(failed)


def render_flags(parser: Parser) -> None:
    """Flags of `render`."""
    _source_flags(parser)
    parser.epilog = "After -- come flags of `stoker operator`, such as --runtime-image."


def render(options: Options) -> int:
    """The objects as YAML."""
    try:
        settings = from_arguments(options.rest, {})
    except SettingsError as error:
        raise PluginError(str(error)) from None
    for service in _sources(options):
        model = facts_of(service, catalog(), options.weights, options.shape)
        written = rendered(service, settings, model)
        sys.stdout.write("# uids, and what only a download tells of the model, are zeros here\n")
        sys.stdout.write(yaml.safe_dump_all(written, sort_keys=False, width=120))
    return 0


def rollback_flags(parser: Parser) -> None:
    """Flags of `rollback`."""
    parser.add_argument("name", help="the service")
    parser.add_argument("--to", default="", metavar="HASH", help="the revision (default: the last other that served)")
    parser.add_argument("--list", action="store_true", help="show the revisions, and change nothing")
    parser.add_argument("--dry-run", action="store_true", help="show the patch, and change nothing")


def rollback(options: Options) -> int:
    """Patch the spec back."""
    if options.up:
        raise PluginError("a `stoker up` runs what its manifest says; change that, and start it again.")
    kubectl = Kubectl.of(options)
    service = kubectl.get(RESOURCE, options.name)
    selector = f"--selector=app.kubernetes.io/instance={options.name},app.kubernetes.io/managed-by=stoker"
    records = rollbacks.records_of(service, kubectl.items("controllerrevisions", selector))
    if options.list:
        show(rollbacks.listed(service, records))
        return 0
    record = rollbacks.target(service, records, options.to)
    patch = rollbacks.operations(service, record)
    if not patch:
        show([f"{options.name}: the spec says already what revision {record.hash} was made of; nothing to change"])
    elif options.dry_run:
        show([yaml.safe_dump(patch, sort_keys=False, width=120).rstrip()])
    else:
        kubectl.patch(f"{RESOURCE}/{options.name}", patch)
        show([f"{options.name}: the spec says again what revision {record.hash} was made of; kubectl stoker status"
              f" {options.name} tells of the rollout"])  # fmt: skip
    return 0


def promote_flags(parser: Parser) -> None:
    """Flags of `promote`."""
    parser.add_argument("name", help="the service")
    parser.add_argument("--spec", action="store_true", help="make the spec say what the canary is, and take it out")
    parser.add_argument("--dry-run", action="store_true", help="show the patch, and change nothing")


def promote(options: Options) -> int:
    """Ask the operator for it by an annotation; with --spec change the spec."""
    return _ask_of_canary(options, "promote", into_spec=options.spec)


def abort_flags(parser: Parser) -> None:
    """Flags of `abort`."""
    parser.add_argument("name", help="the service")
    parser.add_argument("--dry-run", action="store_true", help="show the patch, and change nothing")


def abort(options: Options) -> int:
    """Ask the operator for it by an annotation."""
    return _ask_of_canary(options, "abort")


def _ask_of_canary(options: Options, wish: str, *, into_spec: bool = False) -> int:
    if options.up:
        raise PluginError("a `stoker up` runs what its manifest says; change that, and start it again.")
    kubectl = Kubectl.of(options)
    service = kubectl.get(RESOURCE, options.name)
    patch = canaries.into_spec(service) if into_spec else canaries.wish(service, wish)
    if options.dry_run:
        show([yaml.safe_dump(patch, sort_keys=False, width=120).rstrip()])
        return 0
    kubectl.patch(f"{RESOURCE}/{options.name}", patch)
    done = "the spec says what the canary was" if into_spec else f"asked to {wish} its canary"
    show([f"{options.name}: {done}; kubectl stoker status {options.name} tells what becomes of it"])
    return 0


@contextmanager
def _reached(options: Options) -> Iterator[tuple[str, str]]:
    """(address, API key) of the service, while the way to it is open."""
    place = place_of(options)
    service = place.service(options.name)
    if isinstance(place, UpPlace):
        yield str(place.record(options.name)["url"]).removesuffix("/v1"), ""
        return
    kubectl = Kubectl.of(options)
    key = api_key(kubectl, service)
    with forwarded(kubectl, service) as url:
        yield url, key


def wake_flags(parser: Parser) -> None:
    """Flags of `wake`."""
    parser.add_argument("name", help="the service")
    parser.add_argument("--for", dest="lasts", default="", metavar="TIME",
                        help="stay awake for so long whether anybody asks or not, such as 45m or 8h (default: the"
                        " spec's idleAfter)")  # fmt: skip
    _waiting_flags(parser)


def wake(options: Options) -> int:
    """Ask the operator to wake it, and show the steps until a pod answers."""
    return _wish(options, sleeps.wish("wake", options.lasts), wakes=True)


def sleep_flags(parser: Parser) -> None:
    """Flags of `sleep`."""
    parser.add_argument("name", help="the service")
    _waiting_flags(parser)


def sleep(options: Options) -> int:
    """Ask the operator to put it to sleep once no pod has a request, and show the steps until no pod runs."""
    return _wish(options, sleeps.wish("sleep"), wakes=False)


def _waiting_flags(parser: Parser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="ask, and wait for nothing")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS",
                        help="wait for so long (default: %(default)g)")  # fmt: skip


def _wish(options: Options, asked: str, *, wakes: bool) -> int:
    if options.up:
        raise PluginError("a `stoker up` has no activator, so its pods run all the time: end it, and start it again.")
    kubectl = Kubectl.of(options)
    sleeps.check(kubectl.get(RESOURCE, options.name))
    kubectl.text("annotate", "--overwrite", f"{RESOURCE}/{options.name}", f"{WISH}={asked}")
    show([f"{options.name}: asked to {options.verb}"])
    if not options.no_wait:
        for line in sleeps.steps(lambda: kubectl.get(RESOURCE, options.name), asked, wakes, options.timeout):
            show([line])
    return 0


def chat_flags(parser: Parser) -> None:
    """Flags of `chat`."""
    parser.add_argument("name", help="the service")
    parser.add_argument("question", nargs="*", help="ask this one thing and leave")
    parser.epilog = "After -- come flags of `stoker chat`, such as --system and --temperature."


def chat(options: Options) -> int:
    """Talk to it."""
    with _reached(options) as (url, key):
        return run("chat", url, key, [*options.rest, *options.question])


def bench_flags(parser: Parser) -> None:
    """Flags of `bench`."""
    parser.add_argument("name", help="the service")
    parser.epilog = "After -- come flags of `stoker bench http`, such as --n, --input-len and --output-len."


def bench(options: Options) -> int:
    """Measure it. The way through the API server is slower than a client's in the cluster."""
    with _reached(options) as (url, key):
        return run("bench http", url, key, options.rest)


def presets_flags(parser: Parser) -> None:
    """Flags of `presets`."""
    parser.add_argument("name", nargs="?", default="", help="print this one's manifest")


def presets(options: Options) -> int:
    """The list, or one manifest."""
    every = catalog()
    if options.name:
        sys.stdout.write(named(options.name, every).text)
        return 0
    rows = [("NAME", "MODEL", "GPU", "NEEDED", "WHAT FOR")]
    rows += [_preset_row(preset) for preset in every]
    show(table(rows))
    show(["", "kubectl stoker presets NAME | kubectl apply -f -"])
    return 0


def _preset_row(preset: Preset) -> tuple[str, str, str, str, str]:
    service = preset.service
    products = service.resources.gpu_products
    model = facts_of(service, [preset], "", "")
    needed = f"{fits.on(service, model, products).required_gib:.1f} GiB" if products else "-"
    said = f"{preset.title}; {preset.measured}" if preset.measured else preset.title
    return preset.name, service.model.uri, ", ".join(products) or "none", needed, said
