#!/usr/bin/env python3
"""A Kubernetes control plane on this machine, by hand.

    python e2e/cluster/rig.py build [NAME…]      # default: what the tests need
    python e2e/cluster/rig.py up                 # etcd, kube-apiserver and controllers, until Ctrl-C

Knows nothing of nodes: objects are stored and controllers act on them, no pod runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from e2e.cluster import apiserver
from e2e.cluster.binaries import BINARIES, BuildError, ensure

# What `make test` uses: the API server for the operator, helm and kubectl for the chart.
FOR_TESTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm")


def build(options: argparse.Namespace) -> int:
    """Build binaries and print where they are."""
    for name, path in ensure(options.names or FOR_TESTS).items():
        print(f"{name}: {path}")
    return 0


def up(options: argparse.Namespace) -> int:
    """Run a control plane in the foreground."""
    running = apiserver.start(options.folder, controllers=["*"])
    print(f"export KUBECONFIG={running.kubeconfig}\nCtrl-C ends it.", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        return 0
    finally:
        running.stop()
    return 0


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description="Kubernetes from plain processes.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="build Kubernetes' binaries with Go")
    command.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BINARIES)}")
    command.set_defaults(run=build)
    command = commands.add_parser("up", help="run a control plane until Ctrl-C")
    command.add_argument("--folder", type=Path, default=Path(__file__).parent / "run")
    command.set_defaults(run=up)
    options = parser.parse_args()
    try:
        return int(options.run(options))
    except (BuildError, apiserver.StartError) as error:
        print(f"rig: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
