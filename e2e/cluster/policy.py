"""NetworkPolicies of a node of this machine, as nftables rules: the part of a CNI that its bridge plug-in lacks.

Pods of one node meet on a bridge whose packets the firewall sees (`bridge-nf-call-iptables`, which network.py sets).
What the node itself sends, the kubelet's probes and clients of this machine, does not cross it, as with other CNIs.
Invariants: pure but for `enforce` and `lift`; a pod that no policy selects is free, one that a policy selects is
reached, or reaches, by what some policy allows and by nothing else; answers follow their requests.
Knows nothing of Stoker.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

TABLE = "stoker-policies"
Object = Mapping[str, Any]


class Unsupported(ValueError):
    """A part of a policy that is not translated here; the message names it."""


def enforce(policies: Sequence[Object], pods: Sequence[Object], namespaces: Sequence[Object]) -> None:
    """Put the rules for these objects in place of those before. Raises CalledProcessError, Unsupported."""
    text = f"table inet {TABLE}\ndelete table inet {TABLE}\n{rules(policies, pods, namespaces)}"
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, capture_output=True)


def lift() -> None:
    """Remove the rules, if there are any."""
    subprocess.run(["nft", "delete", "table", "inet", TABLE], capture_output=True)


def rules(policies: Sequence[Object], pods: Sequence[Object], namespaces: Sequence[Object]) -> str:
    """The table for nft."""
    labels = {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in namespaces}
    chains, jumps = [], []
    for number, pod in enumerate(pod for pod in pods if _address(pod)):
        for direction, side in (("Ingress", "daddr"), ("Egress", "saddr")):
            chosen = [policy for policy in policies if _isolates(policy, pod, direction)]
            if not chosen:
                continue
            name = f"{direction.lower()}-{number}"
            allowed = [line for policy in chosen for line in _allowed(policy, pod, pods, labels, direction)]
            chains.append(_chain(name, [*allowed, "drop"]))
            jumps.append(f"ip {side} {_address(pod)} jump {name}")
    head = ["type filter hook forward priority -5; policy accept;", "ct state established,related accept"]
    return f"table inet {TABLE} {{\n{''.join(chains)}{_chain('forward', [*head, *jumps])}}}\n"


def _chain(name: str, lines: Iterable[str]) -> str:
    inside = "".join(f"    {line}\n" for line in lines)
    return f"  chain {name} {{\n{inside}  }}\n"


def _address(pod: Object) -> str:
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed") or pod["spec"].get("hostNetwork")
    return "" if ended else str(pod.get("status", {}).get("podIP") or "")


def _isolates(policy: Object, pod: Object, direction: str) -> bool:
    spec, here = policy["spec"], policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    return here and direction in types and _selects(spec.get("podSelector") or {}, pod["metadata"].get("labels") or {})


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    if unknown := set(selector) - {"matchLabels", "matchExpressions"}:
        raise Unsupported(f"a selector with {', '.join(sorted(unknown))}")
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(term, labels) for term in selector.get("matchExpressions") or ()
    )


def _holds(term: Object, labels: Mapping[str, str]) -> bool:
    """Whether labels meet one of a selector's expressions."""
    value, values = labels.get(str(term["key"])), term.get("values") or ()
    match term["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise Unsupported(f"an expression with the operator {term['operator']}")


def _allowed(
    policy: Object, pod: Object, pods: Sequence[Object], labels: Mapping[str, Any], direction: str
) -> Iterator[str]:
    """A line for each peer and port that a policy lets through."""
    key, side, ends = ("from", "saddr", "ingress") if direction == "Ingress" else ("to", "daddr", "egress")
    for rule in policy["spec"].get(ends) or ():
        peers = [""]
        if key in rule:
            peers = [f"ip {side} {address} " for address in _peers(rule[key], policy, pods, labels)]
        ports = [_port(port, pod, direction) for port in rule["ports"]] if rule.get("ports") else [""]
        yield from (f"{peer}{port} return".strip() for peer in peers for port in ports)


def _peers(peers: Sequence[Object], policy: Object, pods: Sequence[Object], labels: Mapping[str, Any]) -> list[str]:
    found = []
    for peer in peers:
        if unknown := set(peer) - {"podSelector", "namespaceSelector", "ipBlock"}:
            raise Unsupported(f"a peer with {', '.join(sorted(unknown))}")
        if "ipBlock" in peer:
            found.append(str(peer["ipBlock"]["cidr"]))
            continue
        for pod in (pod for pod in pods if _address(pod)):
            place, own = pod["metadata"]["namespace"], policy["metadata"]["namespace"]
            wide = peer.get("namespaceSelector")
            there = place == own if wide is None else _selects(wide, labels.get(place) or {})
            if there and _selects(peer.get("podSelector") or {}, pod["metadata"].get("labels") or {}):
                found.append(_address(pod))
    return found


def _port(port: Object, pod: Object, direction: str) -> str:
    protocol, number = str(port.get("protocol", "TCP")).lower(), port.get("port")
    if number is None:
        return f"meta l4proto {protocol}"
    if isinstance(number, str):
        if direction == "Egress":
            raise Unsupported("an egress port by name")
        named = [item for part in pod["spec"]["containers"] for item in part.get("ports") or ()]
        number = next((item["containerPort"] for item in named if item.get("name") == number), 0)
    last = port.get("endPort")
    return f"{protocol} dport {number}-{last}" if last else f"{protocol} dport {number}"
