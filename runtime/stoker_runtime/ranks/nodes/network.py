"""Addresses of this machine: where the leader listens, and which interface an address belongs to.

Invariants: IPv4 and IPv6. What cannot be told is "", and left to whoever asks the system next.
Knows nothing of what is spoken.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from stoker_runtime.errors import ConfigError
from stoker_runtime.parallel.meeting import LOOPBACK

BACKLOG = 128
ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of netdevice(7)."""
IPV6_INTERFACES = Path("/proc/net/if_inet6")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` where that is an address, else on all; `port` 0 is any. Raises ConfigError."""
    try:
        if _is_address(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"Nodes cannot be awaited on {host}:{port}: {error.strerror}. master_addr has to be this machine's, and "
            "master_port free.",
            param="master_port",
        ) from error


def interface_of(address: str) -> str:
    """The interface with `address`; "" for none."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return LOOPBACK
    if isinstance(found, ipaddress.IPv6Address):
        rows = [line.split() for line in IPV6_INTERFACES.read_text().splitlines()]
        return next((row[-1] for row in rows if row[0] == found.exploded.replace(":", "")), "")
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == str(found)), "")


def _ipv4_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, ADDRESS_OF_INTERFACE, request)
        except OSError:
            return ""  # it has none
    return socket.inet_ntoa(answer[20:24])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
