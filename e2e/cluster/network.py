"""The node's network: a bridge that holds its address, a firewall table, forwarding.

Invariants: pods and services never reach the machine's uplink, nor the uplink them; `down` undoes `up`, whatever of
it had been done, and restores the kernel settings that `up` wrote down.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from e2e.cluster.layout import FIREWALL, NODE_ADDRESS, NODE_BRIDGE, POD_BRIDGE, POD_NETWORK, SERVICE_NETWORK, Layout
from e2e.cluster.processes import StartError

_SETTINGS = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")


def up(layout: Layout) -> None:
    """Make the bridge, the firewall and the kernel settings. Raises StartError."""
    if "kube-proxy" in _run("nft", "list", "tables"):
        raise StartError("this machine already has a kube-proxy: set KUBECONFIG to use its cluster")
    uplink = _uplink()
    # No port is ever plugged into it: it only gives the address a device of its own.
    _run("ip", "link", "add", NODE_BRIDGE, "type", "bridge")
    _run("ip", "link", "set", NODE_BRIDGE, "up")
    _run("ip", "address", "add", f"{NODE_ADDRESS}/32", "dev", NODE_BRIDGE)
    # A service address that nothing translates ends here, not at the uplink's router.
    _run("ip", "route", "add", SERVICE_NETWORK, "dev", NODE_BRIDGE, "src", NODE_ADDRESS)
    _run("nft", "-f", "-", text=_firewall(uplink))
    settings = [Path("/proc/sys") / name for name in _SETTINGS]
    before = {str(path): path.read_text() for path in settings if path.exists()}
    layout.run.mkdir(parents=True, exist_ok=True)
    (layout.run / "sysctl.json").write_text(json.dumps(before))
    for path in before:
        Path(path).write_text("1\n")


def down(layout: Layout) -> None:
    """Remove all of it, and what CNI and kube-proxy made."""
    for table in (f"inet {FIREWALL}", "ip kube-proxy", "ip6 kube-proxy"):
        _try("nft", "delete", "table", *table.split())
    for device in (POD_BRIDGE, NODE_BRIDGE):
        _try("ip", "link", "delete", device)
    saved = layout.run / "sysctl.json"
    if saved.exists():
        for path, value in json.loads(saved.read_text()).items():
            Path(path).write_text(value)


def _firewall(uplink: str) -> str:
    inside = f"{{ {SERVICE_NETWORK}, {POD_NETWORK}, {NODE_ADDRESS}/32 }}"
    rules = f"""
      chain forward {{
        type filter hook forward priority -10; policy accept;
        iifname "{POD_BRIDGE}" oifname "{uplink}" drop
        iifname "{uplink}" oifname "{POD_BRIDGE}" drop
      }}
      chain output {{
        type filter hook output priority 300; policy accept;
        oifname "{uplink}" ip daddr {inside} drop
      }}"""
    return f"table inet {FIREWALL} {{{rules}\n}}\n"


def _uplink() -> str:
    """The device that leads out of the machine; a name that no device has, where none does."""
    words = _try("ip", "-o", "route", "get", "192.0.2.1").split()
    return words[words.index("dev") + 1] if "dev" in words else "no-uplink"


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _try(*command: str) -> str:
    """The output, empty when it fails: what is to be removed may not be there, nor the command that made it."""
    return subprocess.run(command, capture_output=True, text=True).stdout if shutil.which(command[0]) else ""
