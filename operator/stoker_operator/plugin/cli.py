"""`kubectl stoker VERB`: the table of verbs, their flags, and how each ends.

Invariants: exit status 0, 1 when a verb cannot do what it is asked, 2 for a wrong command line, 130 after Ctrl-C; what
is asked for goes to stdout, everything else to stderr.
Knows nothing of how a verb works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from stoker_operator.plugin import completion, verbs
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.kubectl import Kubectl, add_flags
from stoker_operator.plugin.place import ClusterPlace, Place, UpPlace
from stoker_operator.plugin.presets import catalog
from stoker_operator.spec.service import SpecError

INTERRUPTED = 130
DEFAULT_DATA = Path("~/.cache/stoker")


class Verb(NamedTuple):
    """A verb: what runs it, what adds its flags, one line of help."""

    run: Callable[[argparse.Namespace], int]
    flags: Callable[[argparse.ArgumentParser], None]
    help: str


VERBS = {
    "status": Verb(verbs.status, verbs.status_flags, "what a service waits for, since when, and what to do"),
    "logs": Verb(verbs.logs, verbs.logs_flags, "the logs that matter now"),
    "fit": Verb(verbs.fit, verbs.fit_flags, "whether a model fits, on the spec's GPUs and on usual ones"),
    "render": Verb(verbs.render, verbs.render_flags, "what the operator would write for a manifest, without a cluster"),
    "rollback": Verb(verbs.rollback, verbs.rollback_flags, "make the spec say what an earlier revision was made of"),
    "wake": Verb(verbs.wake, verbs.wake_flags, "wake a service that sleeps, and show the steps"),
    "sleep": Verb(verbs.sleep, verbs.sleep_flags, "put a service to sleep once nobody asks it anything"),
    "promote": Verb(verbs.promote, verbs.promote_flags, "let a canary go to all pods, or move it into the spec"),
    "abort": Verb(verbs.abort, verbs.abort_flags, "take a canary back"),
    "chat": Verb(verbs.chat, verbs.chat_flags, "talk to a service, through a port-forward"),
    "bench": Verb(verbs.bench, verbs.bench_flags, "measure a service under load, through a port-forward"),
    "presets": Verb(verbs.presets, verbs.presets_flags, "manifests that are ready to apply"),
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="kubectl stoker", description="InferenceServices, for people.", allow_abbrev=False
    )
    every = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        one = every.add_parser(name, help=verb.help, description=f"{verb.help[0].upper()}{verb.help[1:]}.",
                               allow_abbrev=False)  # fmt: skip
        verb.flags(one)
        add_flags(one)
        up = one.add_argument_group("on this machine")
        up.add_argument("--up", action="store_true", help="a `stoker up` of this machine in place of a cluster")
        up.add_argument("--data", type=Path, default=DEFAULT_DATA, help="its folder of data (default: %(default)s)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    mark = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser().parse_known_args(arguments[:mark])
    _place_words(options, words)
    options.rest = arguments[mark + 1 :]
    if options.rest and options.verb not in verbs.PASSING_ON:
        parser().error(f"{options.verb} hands nothing on; leave out what follows --")
    try:
        return VERBS[options.verb].run(options)
    except SpecError as error:
        sys.stderr.write("".join(f"kubectl stoker {options.verb}: {problem}\n" for problem in error.problems))
    except PluginError as error:
        sys.stderr.write(f"kubectl stoker {options.verb}: {error}\n")
    except BrokenPipeError:
        sys.stderr.close()  # `kubectl stoker logs | head`
    except KeyboardInterrupt:
        return INTERRUPTED
    return 1


def _place_words(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Words that follow flags, which argparse takes for none of its own: the name, then a question."""
    left = list(words)
    if left and not left[0].startswith("-") and not getattr(options, "name", "-"):
        options.name = left.pop(0)
    if hasattr(options, "question") and not any(word.startswith("-") for word in left):
        options.question, left = [*options.question, *left], []
    if left:
        parser().error(f"{options.verb}: {left[0]!r} is not known")


def complete(argv: Sequence[str] | None = None) -> int:
    """`kubectl_complete-stoker WORD…`: what the last word may become."""
    words = list(sys.argv[1:] if argv is None else argv)

    def services(before: Sequence[str]) -> Iterable[str]:
        try:
            options, _ = parser().parse_known_args([*before])
            place: Place = UpPlace(options.data.expanduser()) if options.up else ClusterPlace(Kubectl.of(options))
            return [str(service["metadata"]["name"]) for service in place.services()]
        except (PluginError, SystemExit):
            return []

    found, directive = completion.candidates(parser(), words, services, lambda: [each.name for each in catalog()])
    sys.stdout.write("".join(f"{line}\n" for line in (*found, directive)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
