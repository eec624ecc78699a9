"""Where the node keeps what it has, and the names and addresses it uses.

Sockets and state are below /run, since their paths must be short; data is beside this file and is removed when the
node goes; the cache (image archives, base images, docker's layers) stays for the next run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NODE_NAME = "node1"
NODE_ADDRESS = "10.88.0.1"
API_PORT = 6443
ETCD_PORT = 23790
SERVICE_NETWORK = "10.96.0.0/16"
DNS_ADDRESS = "10.96.0.10"
POD_NETWORK = "10.244.0.0/16"
POD_SUBNET = "10.244.0.0/24"
NODE_BRIDGE = "stoker-node"
POD_BRIDGE = "stoker-pods"
FIREWALL = "stoker-e2e"
PAUSE_IMAGE = "stoker.local/pause:1"
DNS_IMAGE = "stoker.local/coredns:1"
STORAGE_CLASS = "folder"
LIMITED_STORAGE_CLASS = "limited"
# pytest's status where a run with an end could not make its cluster: no scenario has begun.
NO_CLUSTER = 77


@dataclass(frozen=True)
class Layout:
    """Folders of one node."""

    run: Path = Path("/run/stoker-e2e")
    docker_run: Path = Path("/run/stoker-docker")
    data: Path = HERE / "run" / "node"
    cache: Path = HERE / "run" / "cache"

    @property
    def state(self) -> Path:
        """Which processes run."""
        return self.run / "processes.json"

    @property
    def logs(self) -> Path:
        """One log a process; kept until the next start."""
        return HERE / "run" / "log"

    @property
    def keys(self) -> Path:
        """Tokens, keys and certificates."""
        return self.data / "keys"

    @property
    def devices(self) -> Path:
        """Where drivers of devices say what a container gets (CDI)."""
        return self.data / "cdi"

    @property
    def config(self) -> Path:
        """What the components are configured with."""
        return self.data / "config"

    @property
    def volumes(self) -> Path:
        """One folder for each persistent volume."""
        return self.data / "volumes"

    @property
    def containerd(self) -> Path:
        """containerd's socket."""
        return self.run / "containerd.sock"

    @property
    def docker(self) -> Path:
        """dockerd's socket."""
        return self.docker_run / "docker.sock"

    def kubeconfig(self, user: str = "admin") -> Path:
        """The kubeconfig of a user."""
        return self.data / "config" / f"{user}.kubeconfig"
