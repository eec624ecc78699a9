"""A cluster with Stoker's images in it: the one of KUBECONFIG, else `kind`'s, else a node on this machine.

    with cluster() as given: …

Invariants: what was made is gone at the end, also on Ctrl-C and failure; a cluster of the user's is left as it is.
With KUBECONFIG, its nodes must be able to pull the images that STOKER_E2E_IMAGES names: OPERATOR,RUNTIME,HUB.
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

from e2e.cluster import images
from e2e.cluster.binaries import Say, to_stderr
from e2e.cluster.docker import Docker
from e2e.cluster.images import Images
from e2e.cluster.node import Node
from e2e.cluster.processes import StartError, uninterrupted

_KIND_NAME = "stoker-e2e"


@dataclass(frozen=True)
class Given:
    """A cluster to use. `node` is set where it is of this machine's processes, which may then be restarted."""

    kubeconfig: Path
    images: Images
    node: Node | None = None


@contextmanager
def cluster(say: Say = to_stderr) -> Iterator[Given]:
    """Have a cluster. Raises StartError, BuildError, MissingCommand."""
    given = os.environ.get("KUBECONFIG", "")
    docker = Docker(say=say)
    if given:
        say(f"cluster: using KUBECONFIG={given}")
        kubeconfig, node = Path(given.split(os.pathsep)[0]), Node(say=say)
        yield Given(kubeconfig, _named_images(), node if kubeconfig == node.layout.kubeconfig() else None)
    elif shutil.which("kind") and docker.there():
        with docker.running():
            built = images.build(docker)
        with _kind(built, say) as kubeconfig:
            yield Given(kubeconfig, built)
    else:
        with _node(docker, say) as made:
            yield made


@contextmanager
def _node(docker: Docker, say: Say) -> Iterator[Given]:
    node = Node(say=say)
    archive = node.layout.cache / "images.tar"
    with docker.running():
        built = images.build(docker)
        docker.save(built.all, archive)
    kubeconfig = node.up(built.lent)
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
    if built.lent:
        raise StartError("kind's nodes cannot borrow this machine's packages: the base image must come from a registry")
    with tempfile.TemporaryDirectory() as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        say("cluster: making a kind cluster")
        try:
            _run("kind", "create", "cluster", f"--name={_KIND_NAME}", f"--kubeconfig={kubeconfig}", "--wait=120s")
            _run("kind", "load", "docker-image", f"--name={_KIND_NAME}", *built.all)
            yield kubeconfig
        finally:
            with uninterrupted():
                _run("kind", "delete", "cluster", f"--name={_KIND_NAME}")


def _named_images() -> Images:
    names = os.environ.get("STOKER_E2E_IMAGES", "").split(",")
    if len(names) != 3:
        raise StartError("with KUBECONFIG, name the images: STOKER_E2E_IMAGES=OPERATOR,RUNTIME,HUB")
    operator, runtime, hub = names
    return Images(operator, runtime, hub, {})


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
