#!/usr/bin/env python3
"""A Kubernetes cluster on this machine, by hand.

python e2e/cluster/rig.py build [NAME…]      # default: what `make test` needs
python e2e/cluster/rig.py probe              # what this machine lacks to carry a node
python e2e/cluster/rig.py up                 # etcd, kube-apiserver and controllers, until Ctrl-C; no pod runs
python e2e/cluster/rig.py up --node          # a whole cluster with one node and real pods, until Ctrl-C (root)
python e2e/cluster/rig.py down               # end a node whose own process is gone
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from e2e.cluster import apiserver, backend, probe
from e2e.cluster.binaries import BINARIES, BuildError, ensure
from e2e.cluster.debian import MissingCommand
from e2e.cluster.node import BINARIES as FOR_NODE
from e2e.cluster.node import Node
from e2e.cluster.processes import StartError

# What `make test` uses: the API server for the operator, helm and kubectl for the chart, the controller of groups.
FOR_TESTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm", "lws")


def build(options: argparse.Namespace) -> int:
    """Build binaries and print where they are."""
    # So that the compiler ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = options.names or ([*FOR_NODE, "helm", "kubeconform", "crane"] if options.node else FOR_TESTS)
    for name, path in ensure(names).items():
        print(f"{name}: {path}")
    return 0


def lacking(options: argparse.Namespace) -> int:
    """Say what this machine lacks; status 1 when that is anything."""
    missing = probe.lacks()
    print(probe.refusal(missing) if missing else "this machine can carry a node")
    return 1 if missing else 0


def up(options: argparse.Namespace) -> int:
    """Run a cluster in the foreground."""
    # Also where the shell started this in the background, with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _run_node() if options.node else _run_control_plane(options.folder)
    except KeyboardInterrupt:
        return 0


def _run_control_plane(folder: Path) -> int:
    running = apiserver.start(folder, controllers=["*"])
    try:
        _stay(running.kubeconfig)
    finally:
        running.stop()
    return 0


def _run_node() -> int:
    node = Node()
    kubeconfig = node.up()
    try:
        _stay(kubeconfig)
    finally:
        node.down()
    return 0


def _stay(kubeconfig: Path) -> None:
    print(f"export KUBECONFIG={kubeconfig}\nCtrl-C ends it.", flush=True)
    signal.pause()


def down(options: argparse.Namespace) -> int:
    """End a node that is up, and a daemon that built its images."""
    backend.clear()
    return 0


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description="Kubernetes from plain processes.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="build Kubernetes' binaries with Go")
    command.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BINARIES)}")
    command.add_argument("--node", action="store_true", help="all that a node and the scenarios need")
    command.set_defaults(run=build)
    command = commands.add_parser("probe", help="see what this machine lacks to carry a node; installs packages")
    command.set_defaults(run=lacking)
    command = commands.add_parser("up", help="run a cluster until Ctrl-C")
    command.add_argument("--folder", type=Path, default=Path(__file__).parent / "run" / "control-plane")
    command.add_argument("--node", action="store_true", help="with a node, on which pods run; needs root")
    command.set_defaults(run=up)
    command = commands.add_parser("down", help="end a node whose own process is gone")
    command.set_defaults(run=down)
    options = parser.parse_args()
    try:
        return int(options.run(options))
    except (BuildError, MissingCommand, StartError) as error:
        print(f"rig: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
