"""Ends the node's containers and processes and removes what they leave in the kernel: mounts, cgroups, namespaces.

Works without containerd's help, which may be dead or hung: containers are found by their cgroup, shims by the socket
they were given, mounts by their folder.

Invariants: nothing outside the layout's folders, Kubernetes' cgroup and our own shims is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.layout import Layout
from e2e.cluster.processes import Processes

_CGROUPS = Path("/sys/fs/cgroup")
_SHIM_SOCKETS = Path("/run/containerd/s")
_PATIENCE_SECONDS = 20.0
# Folders that containerd, the kubelet and CNI make whatever they are told.
NODE_FOLDERS = ("/run/containerd", "/run/runc", "/var/lib/kubelet", "/var/lib/cni", "/etc/cni")
DOCKER_FOLDERS = ("/run/docker", "/run/runc", "/run/containerd")


def note(record: Path, folders: tuple[str, ...]) -> None:
    """Write down which of the folders are not there yet, so that `forget` may remove them."""
    if record.exists():  # of a run that was killed: what is there by now, it made
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps([name for name in folders if not Path(name).exists()]))


def forget(record: Path) -> None:
    """Remove the folders that were not there when `note` looked."""
    if record.exists():
        for name in json.loads(record.read_text()):
            shutil.rmtree(name, ignore_errors=True)
        record.unlink()


def remove(layout: Layout, processes: Processes) -> list[str]:
    """End and remove what `Node.up` and its pods made, in an order in which nothing restarts what was ended.

    Returns the mounts that could not be removed.
    """
    processes.stop("kubelet")
    _kill_containers()
    _delete_by_containerd(layout, processes)
    processes.stop_all()
    _kill_shims(layout)
    left = unmount(layout.run, layout.data)
    _remove_cgroups()
    if not left:
        forget(layout.run / "absent.json")
    return left


def _kill_containers() -> None:
    """SIGKILL to all that is in a pod's cgroup, until nothing is."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (pids := set(_pod_processes())) and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid)
        time.sleep(0.1)


def _pod_processes() -> Iterator[int]:
    for root in _pod_cgroups():
        for path in root.rglob("cgroup.procs"):
            try:
                yield from (int(line) for line in path.read_text().split())
            except OSError:  # the group went while we looked
                continue


def _pod_cgroups() -> list[Path]:
    """`kubepods` of every hierarchy (version 1), or of the one there is (version 2)."""
    return [path for path in (_CGROUPS / "kubepods", *_CGROUPS.glob("*/kubepods")) if path.is_dir()]


def _delete_by_containerd(layout: Layout, processes: Processes) -> None:
    """Let containerd take its containers down itself: this ends shims and removes their sockets."""
    if not processes.alive("containerd"):
        return
    client = ["ctr", "-a", str(layout.containerd), "-n", "k8s.io"]
    search = os.environ | {"PATH": f"{_folder_of(processes, 'containerd')}:{os.environ['PATH']}"}

    def ctr(*arguments: str) -> str:
        try:
            done = subprocess.run([*client, *arguments], env=search, capture_output=True, text=True, timeout=30)
        except (subprocess.TimeoutExpired, FileNotFoundError):
            return ""
        return done.stdout

    tasks = ctr("tasks", "ls", "-q").split()
    if tasks:
        ctr("tasks", "rm", "--force", *tasks)


def _folder_of(processes: Processes, name: str) -> Path:
    return Path(processes.command(name)[0]).parent


def _kill_shims(layout: Layout) -> None:
    """Shims that containerd could not end."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_shim(entry, str(layout.containerd)):
            _kill(int(entry.name))
    if _SHIM_SOCKETS.is_dir():
        for path in _SHIM_SOCKETS.iterdir():
            if not _listening(path):
                path.unlink(missing_ok=True)


def _is_shim(process: Path, socket: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it ended while we looked
        return False
    return "containerd-shim-runc-v2" in words[0] and socket in words


def _listening(path: Path) -> bool:
    return str(path) in Path("/proc/net/unix").read_text()


def unmount(*folders: Path) -> list[str]:
    """Remove the mounts below the folders, the deepest first; returns those that stayed."""
    for _ in range(3):
        for point in sorted(_mounts(folders), key=len, reverse=True):
            subprocess.run(["umount", "--lazy", point], capture_output=True)
    return _mounts(folders)


def _mounts(folders: tuple[Path, ...]) -> list[str]:
    points = [line.split()[1].replace("\\040", " ") for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(tuple(f"{folder}/" for folder in folders))]


def _remove_cgroups() -> None:
    for root in _pod_cgroups():
        folders = sorted((path for path in root.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
        for folder in [*folders, root]:
            _remove_cgroup(folder)


def _remove_cgroup(folder: Path) -> None:
    """A group is busy for a moment after its last process went."""
    deadline = time.monotonic() + 2
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
