"""Says what this machine lacks to carry a node, before anything is made on it.

Each check tries the thing itself, in namespaces and folders that are gone afterwards: what a file or a version says
is often not what a container is allowed to do.

Invariants: leaves nothing behind but Debian packages that were missing; never raises for what is only missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from e2e.cluster.binaries import Say, to_stderr
from e2e.cluster.debian import MissingCommand, ensure_commands
from e2e.cluster.layout import ETCD_PORT, Layout

COMMANDS = ("runc", "nft", "iptables", "conntrack", "ip", "openssl", "mount", "unshare")
CGROUPS = Path("/sys/fs/cgroup")
# Two operators, a hub and three engines of 1.5 GB beside the cluster itself; images, their layers and the node's data.
_MEMORY = 5 * 2**30
_DISK = 8 * 10**9
# Of etcd, the kubelet, kube-proxy, the controllers and the scheduler.
_PORTS = (ETCD_PORT, ETCD_PORT + 1, 10248, 10249, 10256, 10257, 10259)
_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_HIERARCHIES = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "freezer")
_NAMESPACES = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
_BRIDGE = "ip link add probe type bridge && ip link add one type veth peer name two && ip link set one master probe"
# What kube-proxy's rules are made of.
_RULES = """
table ip probe {
  map services { type inet_proto . inet_service : verdict; }
  chain nat { type nat hook prerouting priority -100; meta l4proto . th dport vmap @services; }
  chain one { numgen random mod 2 vmap { 0 : goto two, 1 : goto two }; }
  chain two { meta l4proto tcp dnat to 192.0.2.1:80; }
  chain post { type nat hook postrouting priority 100; fib daddr type local masquerade; }
}
"""


def lacks(layout: Layout | None = None, say: Say = to_stderr) -> list[str]:
    """What is missing, in words; nothing when a node can be made. Missing Debian packages are installed."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return [f"Linux on x86_64 (this is {platform.system()} on {platform.machine()})"]
    if os.geteuid() != 0:
        return [f"root (this runs as user {os.geteuid()})"]
    layout = layout or Layout()
    found = [*sizes(layout.cache), *taken(_PORTS), *cgroups(CGROUPS)]
    try:
        ensure_commands(COMMANDS, say)
    except MissingCommand as error:
        return [*found, f"Debian packages ({str(error).splitlines()[0]})"]
    return [*found, *_kernel(layout.cache)]


def refusal(missing: list[str]) -> str:
    """What `lacks` found, as a sentence."""
    return f"this machine cannot carry a node; it lacks {'; '.join(missing)}"


def sizes(folder: Path) -> list[str]:
    """Whether memory and disk are enough."""
    found = []
    if (memory := _memory()) < _MEMORY:
        found.append(f"memory ({memory / 2**30:.1f} GiB are free, {_MEMORY / 2**30:.0f} are needed)")
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if (disk := shutil.disk_usage(place).free) < _DISK:
        found.append(f"disk ({disk / 1e9:.1f} GB are free at {place}, {_DISK / 1e9:.0f} are needed)")
    return found


def taken(ports: Iterable[int]) -> list[str]:
    """Which of the ports are in use on loopback."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            # As servers do: a connection that ended a moment ago holds no port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                found.append(f"port {port} (another program listens there)")
    return found


def cgroups(root: Path) -> list[str]:
    """Whether groups can be made, with the controllers that the kubelet asks for."""
    if (root / "cgroup.controllers").exists():
        return _unified(root)
    found = []
    for name in _HIERARCHIES:
        try:
            _make_group(root / name)
        except OSError as error:
            found.append(f"a writable cgroup hierarchy {name} ({error.strerror})")
    return found


def _unified(root: Path) -> list[str]:
    control = root / "cgroup.subtree_control"
    have = (root / "cgroup.controllers").read_text().split()
    if absent := [name for name in _CONTROLLERS if name not in have]:
        return [f"the cgroup controllers {', '.join(absent)}"]
    before = control.read_text().split()
    fresh = [name for name in _CONTROLLERS if name not in before]
    try:
        _make_group(root)
        for name in fresh:
            control.write_text(f"+{name}")
        for name in fresh:
            control.write_text(f"-{name}")
    except OSError as error:
        return [f"a writable cgroup v2 at {root} ({error.strerror})"]
    return []


def _make_group(parent: Path) -> None:
    group = parent / "stoker-probe"
    group.mkdir()
    group.rmdir()


def _memory() -> int:
    """Free bytes: the machine's, or what the group this runs in may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = ((CGROUPS / name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # the root group has no limit, others may say "max"
        return free


def _kernel(folder: Path) -> list[str]:
    if problem := _fails([*_NAMESPACES, "true"]):
        return [f"namespaces ({problem})"]
    found = []
    if problem := _overlay_fails(folder):
        found.append(f"overlay mounts below {folder} ({problem})")
    if problem := _fails([*_NAMESPACES, "sh", "-ec", _BRIDGE]):
        found.append(f"bridges and veth pairs ({problem})")
    if problem := _fails([*_NAMESPACES, "nft", "-f", "-"], _RULES):
        found.append(f"nftables with NAT ({problem})")
    if "kube-proxy" in subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout:
        found.append("a firewall without kube-proxy's tables (this machine is a node already: set KUBECONFIG)")
    if not os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK):
        found.append("a writable /proc/sys")
    return found


def _overlay_fails(folder: Path) -> str:
    """As containerd mounts them: lower, upper and work on the file system that will hold the data."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for part in ("lower", "upper", "work", "merged"):
            (Path(name) / part).mkdir()
        options = f"lowerdir={name}/lower,upperdir={name}/upper,workdir={name}/work"
        mount = f"mount -t overlay -o {options} overlay {name}/merged && touch {name}/merged/file"
        return _fails([*_NAMESPACES, "sh", "-ec", mount])


def _fails(command: list[str], text: str | None = None) -> str:
    """Why a command failed, in one line; empty when it did not."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return said[0] if done.returncode else ""
