"""A Kubernetes node on this machine from plain processes: `up` makes it, `down` leaves nothing behind.

    1. packages and binaries          4. containerd, its two images, kubelet, kube-proxy
    2. bridge and firewall            5. cluster DNS, volumes
    3. control plane

Invariants: one node a machine; all that runs is in the state file, so `down` works from another process and after a
crash; `down` may be called at any time and any number of times, and a second Ctrl-C does not stop it half-way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster import control_plane, network, node_config, probe, remains
from e2e.cluster.binaries import Say, ensure, to_stderr
from e2e.cluster.image_tar import write_image
from e2e.cluster.layout import DNS_ADDRESS, DNS_IMAGE, HERE, NODE_ADDRESS, NODE_NAME, PAUSE_IMAGE, Layout
from e2e.cluster.processes import Processes, StartError, uninterrupted

_PLUGINS = ("bridge", "loopback", "host-local", "portmap")
BINARIES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
    *("containerd", "containerd-shim-runc-v2", "ctr", "coredns", "pause"),
    *_PLUGINS,
)
_READY_SECONDS = 120.0


class Node:
    """The node of this machine."""

    def __init__(self, layout: Layout | None = None, say: Say = to_stderr) -> None:
        self.layout = layout or Layout()
        self.processes = Processes(self.layout.state, self.layout.logs)
        self._say = say
        self._binaries: dict[str, Path] = {}

    def up(self, mounts: Mapping[Path, str] | None = None) -> Path:
        """Make the node and return the path of its kubeconfig.

        `mounts` are folders of this machine that every container sees, read-only, by the path in it.
        Raises StartError or BuildError; what had been made by then is gone again.
        """
        if self.running():
            raise StartError("the node is up already; `rig.py down` ends it")
        self.down()
        if missing := probe.lacks(self.layout, self._say):
            raise StartError(probe.refusal(missing))
        self._binaries = ensure(BINARIES, self._say)
        started = time.monotonic()
        try:
            self._up(dict(mounts or {}))
        except BaseException:
            self.down()
            raise
        self._say(f"cluster: node {NODE_NAME} is ready after {time.monotonic() - started:.0f} s")
        return self.layout.kubeconfig()

    def down(self) -> None:
        """End every process and remove every trace but logs and the cache.

        Raises StartError when a mount cannot be removed: what is below it is then left alone.
        """
        with uninterrupted():
            left = remains.remove(self.layout, self.processes)
            network.down(self.layout)
            if left:
                raise StartError(f"still mounted: {', '.join(left)}; `umount` it, then: rig.py down")
            shutil.rmtree(self.layout.data, ignore_errors=True)
            shutil.rmtree(self.layout.run, ignore_errors=True)

    def running(self) -> bool:
        """Whether a node is up on this machine, and the process that made it is there to take it down."""
        return self.processes.alive("kubelet") and self.processes.owned()

    def ctr(self, *arguments: str) -> str:
        """Run containerd's client in the namespace of Kubernetes' images."""
        return run([self._path("ctr"), "-a", str(self.layout.containerd), "-n", "k8s.io", *arguments])

    def import_image(self, archive: Path) -> None:
        """Make the images of a docker-archive known to the kubelet."""
        self.ctr("images", "import", "--local", str(archive))

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl as the cluster's administrator."""
        return run([self._path("kubectl"), f"--kubeconfig={self.layout.kubeconfig()}", *arguments], text)

    def _path(self, name: str) -> str:
        if name not in self._binaries:
            self._binaries |= ensure([name], self._say)
        return str(self._binaries[name])

    def _up(self, mounts: dict[Path, str]) -> None:
        remains.note(self.layout.run / "absent.json", remains.NODE_FOLDERS)
        self.processes.own()
        network.up(self.layout)
        control_plane.start(self.layout, self.processes, self._binaries)
        plugins = self._collect_plugins()
        node_config.write(self.layout, runc=shutil.which("runc") or "runc", cni=plugins)
        self._start_containerd(mounts)
        self._start_kubelet()
        self._start_addons()

    def _collect_plugins(self) -> Path:
        """One folder with the network plugins, wherever each was found."""
        folder = self.layout.data / "plugins"
        folder.mkdir(parents=True, exist_ok=True)
        for name in _PLUGINS:
            (folder / name).symlink_to(self._path(name))
        return folder

    def _start_containerd(self, mounts: dict[Path, str]) -> None:
        plain = json.loads(run([self._path("ctr"), "oci", "spec"]))
        (self.layout.config / "base-spec.json").write_text(json.dumps(node_config.base_spec(plain, mounts)))
        binary = Path(self._path("containerd"))
        # It looks for its shim on the path.
        search = f"{Path(self._path('containerd-shim-runc-v2')).parent}:{os.environ['PATH']}"
        command = [str(binary), f"--config={self.layout.config / 'containerd.toml'}"]
        self.processes.start("containerd", command, {"PATH": search})
        self.processes.wait("containerd", lambda: succeeds([self._path("ctr"), "-a", str(self.layout.containerd),
                                                            "version"]), _READY_SECONDS)  # fmt: skip
        for image, name in ((PAUSE_IMAGE, "pause"), (DNS_IMAGE, "coredns")):
            archive = self.layout.cache / f"{name}.tar"
            write_image(archive, image, {"Entrypoint": [f"/{name}"]}, {name: Path(self._path(name))})
            self.import_image(archive)

    def _start_kubelet(self) -> None:
        layout = self.layout
        command = [self._path("kubelet"), f"--config={layout.config / 'kubelet.json'}"]
        command += [f"--kubeconfig={layout.kubeconfig('kubelet')}", f"--root-dir={layout.data / 'kubelet'}"]
        command += [f"--cert-dir={layout.data / 'kubelet' / 'pki'}", f"--hostname-override={NODE_NAME}"]
        command += [f"--node-ip={NODE_ADDRESS}", "--v=2"]
        self.processes.start("kubelet", command)
        self.processes.wait("kubelet", lambda: fetches("http://127.0.0.1:10248/healthz"), _READY_SECONDS)
        command = [self._path("kube-proxy"), f"--config={layout.config / 'kube-proxy.json'}", "--v=1"]
        self.processes.start("kube-proxy", command)
        self.processes.wait("kube-proxy", lambda: fetches("http://127.0.0.1:10256/healthz"), _READY_SECONDS)

    def _start_addons(self) -> None:
        for name in ("coredns.yaml", "storage.yaml"):
            text = (HERE / "addons" / name).read_text().replace("DNS_ADDRESS", DNS_ADDRESS)
            self.kubectl("apply", "-f", "-", text=text)
        command = [sys.executable, str(HERE / "volumes.py"), f"--kubeconfig={self.layout.kubeconfig()}"]
        self.processes.start("volumes", [*command, f"--folder={self.layout.volumes}", f"--node={NODE_NAME}"])
        self.kubectl("wait", "--for=condition=Ready", f"node/{NODE_NAME}", f"--timeout={_READY_SECONDS:.0f}s")
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s")


def run(command: list[str], text: str | None = None) -> str:
    """The output of a command. Raises StartError with its own words."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"{Path(command[0]).name} {' '.join(command[1:])}:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def succeeds(command: list[str]) -> bool:
    """Whether a command ends with status 0."""
    return subprocess.run(command, capture_output=True).returncode == 0


def fetches(url: str) -> bool:
    """Whether a GET answers 2xx."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False
