"""A cluster with Stoker's images in it: the one of KUBECONFIG, else `kind`'s, else a node on this machine.

    with cluster() as given: …

`kind` is taken where it and Docker are there and a registry serves the base image: its nodes cannot borrow this
machine's Python packages, a node of plain processes can.

Invariants: what was made is gone at the end, also on Ctrl-C and failure; a cluster of the user's is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import foreign, images
from e2e.cluster.binaries import Say, to_stderr
from e2e.cluster.docker import Docker
from e2e.cluster.images import Images
from e2e.cluster.node import Node
from e2e.cluster.processes import NodeStartError, StartError, uninterrupted

KIND_NAME = "stoker-e2e"


@dataclass(frozen=True)
class Given:
    """A cluster to use. `node` is set where it is of this machine's processes, which may then be restarted, and whose
    Services this machine reaches by their addresses.
    """

    kubeconfig: Path
    images: Images
    node: Node | None = None


@contextmanager
def cluster(say: Say = to_stderr) -> Iterator[Given]:
    """Have a cluster. Raises StartError, BuildError, MissingCommand."""
    kubeconfig = foreign.kubeconfig()
    docker = Docker(say=say)
    if kubeconfig is not None:
        say(f"cluster: using KUBECONFIG={kubeconfig}")
        node = Node(say=say)
        yield Given(kubeconfig, foreign.images(), node if kubeconfig == node.layout.kubeconfig() else None)
    elif takes_kind(docker, say):
        with docker.running():
            built = images.build(docker)
        with _kind(built, say) as kubeconfig:
            yield Given(kubeconfig, built)
    else:
        with _node(docker, say) as made:
            yield made


def takes_kind(docker: Docker, say: Say = to_stderr) -> bool:
    """Whether the cluster will be one of `kind`."""
    if shutil.which("kind") is None or not docker.there() or images.lending():
        return False
    if images.ensure_base(docker):
        say("cluster: no registry serves the base image, so kind's nodes would lack PyTorch; making a node here")
        return False
    return True


def clear() -> None:
    """Remove what a run that was killed left on this machine. Raises StartError."""
    with uninterrupted():
        if os.geteuid() == 0:  # nobody else makes a node
            Docker().down()
            Node().down()
        if shutil.which("kind") is not None and Docker().there():
            _run("kind", "delete", "cluster", f"--name={KIND_NAME}")


@contextmanager
def _node(docker: Docker, say: Say) -> Iterator[Given]:
    node = Node(say=say)
    archive = node.layout.cache / "images.tar"
    with docker.running():
        built = images.build(docker)
        docker.save(built.all, archive)
    try:
        kubeconfig = node.up(built.lent)
    except StartError as error:
        raise NodeStartError(str(error)) from error
    try:
        node.import_image(archive)
        archive.unlink()
        say("cluster: images are imported")
        yield Given(kubeconfig, built, node)
    finally:
        node.down()
        say("cluster: the node is gone")


@contextmanager
def _kind(built: Images, say: Say) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        say("cluster: making a kind cluster")
        try:
            for command in kind_commands(kubeconfig, built.all):
                _run(*command)
            yield kubeconfig
        finally:
            with uninterrupted():
                _run("kind", "delete", "cluster", f"--name={KIND_NAME}")


def kind_commands(kubeconfig: Path, names: list[str]) -> list[list[str]]:
    """What makes a cluster of kind with images in it."""
    return [
        ["kind", "create", "cluster", f"--name={KIND_NAME}", f"--kubeconfig={kubeconfig}", "--wait=120s"],
        ["kind", "load", "docker-image", f"--name={KIND_NAME}", *names],
    ]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
