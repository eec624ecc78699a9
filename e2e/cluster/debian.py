"""Installs the Debian packages a node needs, when their commands are missing.

Invariants: a package is named only next to the command it brings; services that a package would start are not
started. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.binaries import Say
from e2e.cluster.processes import uninterrupted

PACKAGES = {
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",  # the portmap plugin of CNI
    "conntrack": "conntrack",
    "ip": "iproute2",
    "sysctl": "procps",
    "mount": "mount",
    "unshare": "util-linux",
    "openssl": "openssl",
    "dockerd": "docker.io",
    "debootstrap": "debootstrap",
    "qemu-aarch64-static": "qemu-user-static",
}
_POLICY = Path("/usr/sbin/policy-rc.d")
_ROOTS_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


class MissingCommand(RuntimeError):
    """A command that the node needs is not there and cannot be installed."""


def ensure_commands(names: Iterable[str], say: Say) -> None:
    """Install the package of each command that is missing; some lie where only root's PATH leads, so it is extended.

    Raises MissingCommand.
    """
    names = list(names)
    there = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*there, *(folder for folder in _ROOTS_FOLDERS if folder not in there)])
    missing = sorted({PACKAGES[name] for name in names if shutil.which(name) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise MissingCommand(f"missing: {', '.join(missing)}; on Debian, as root: apt-get install {' '.join(missing)}")
    say(f"cluster: installing {', '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    # A package that is half installed would be left behind, and keep apt from installing any other.
    with uninterrupted(), _nothing_starts():
        for command in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise MissingCommand(f"apt-get {command[0]} failed:\n{done.stderr[-2000:]}")
    if absent := [name for name in names if shutil.which(name) is None]:
        raise MissingCommand(f"{', '.join(absent)}: not on PATH although {', '.join(missing)} is installed")


@contextmanager
def _nothing_starts() -> Iterator[None]:
    """Debian's own switch that keeps a package from starting its service (invoke-rc.d asks this script)."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    try:
        yield
    finally:
        _POLICY.unlink()
