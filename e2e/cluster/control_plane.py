"""The control plane of the node: etcd, kube-apiserver, controllers and scheduler, on an address that pods can reach.

Unlike `apiserver.py`, which is for tests without a node, everything is on: service accounts, all controllers, the
scheduler, and client certificates for the two that a kubelet and an aggregated API ask for.

Invariants: users are tokens in one file below the folder, made anew for each cluster; the API server's own certificate
is made by itself; nothing listens on an address that leads out of the machine.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from e2e.cluster.apiserver import answers, elliptic_key, front_proxy_flags, openssl, private, write_kubeconfig
from e2e.cluster.layout import (
    API_PORT,
    ETCD_PORT,
    NODE_ADDRESS,
    NODE_NAME,
    POD_NETWORK,
    SERVICE_NETWORK,
    Layout,
)
from e2e.cluster.processes import Processes

URL = f"https://{NODE_ADDRESS}:{API_PORT}"
_READY_SECONDS = 180.0
_USERS = {
    "admin": ("admin", "system:masters"),
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
    "kube-proxy": ("system:kube-proxy", ""),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}


def start(layout: Layout, processes: Processes, binaries: dict[str, Path]) -> None:
    """Start all four and write a kubeconfig for each user. Raises StartError."""
    for folder in (layout.keys, layout.config):
        folder.mkdir(parents=True, exist_ok=True)
    tokens = {user: secrets.token_urlsafe(24) for user in _USERS}
    _write_tokens(layout, tokens)
    _start_etcd(layout, processes, binaries["etcd"])
    processes.start("kube-apiserver", [str(binaries["kube-apiserver"]), *_apiserver_flags(layout)])
    certificate = layout.keys / "apiserver.crt"
    processes.wait(
        "kube-apiserver",
        lambda: certificate.exists() and answers(URL, "/readyz", certificate, tokens["admin"]),
        _READY_SECONDS,
    )
    for user, token in tokens.items():
        write_kubeconfig(layout.kubeconfig(user), URL, certificate, token)
    _start_controllers(layout, processes, binaries)


def _write_tokens(layout: Layout, tokens: dict[str, str]) -> None:
    lines = [f'{tokens[user]},{name},{user},"{group}"\n' for user, (name, group) in _USERS.items()]
    with open(layout.keys / "tokens.csv", "w", opener=private) as stream:
        stream.writelines(lines)
    with open(layout.keys / "service-accounts.key", "w", opener=private) as stream:
        stream.write(elliptic_key())
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
    request = ["req", "-x509", *key]
    openssl(*request, "-subj", "/CN=kubelet-client-ca", "-keyout", "kubelet-ca.key", "-out", "kubelet-ca.crt",
            cwd=layout.keys)  # fmt: skip
    signed = ["-CA", "kubelet-ca.crt", "-CAkey", "kubelet-ca.key", "-addext", "extendedKeyUsage=clientAuth"]
    # The kubelet asks the API server what this user may do; this group may do everything.
    openssl(*request, "-subj", "/O=system:masters/CN=kube-apiserver-kubelet-client", *signed,
            "-keyout", "kubelet-client.key", "-out", "kubelet-client.crt", cwd=layout.keys)  # fmt: skip


def _start_etcd(layout: Layout, processes: Processes, binary: Path) -> None:
    client, peer = (f"http://127.0.0.1:{ETCD_PORT + offset}" for offset in (0, 1))
    command = [str(binary), "--name=node", f"--data-dir={layout.data / 'etcd'}", "--unsafe-no-fsync"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", "--log-level=warn"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=node={peer}"]
    processes.start("etcd", command)


def _apiserver_flags(layout: Layout) -> list[str]:
    keys = layout.keys
    return [
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        # The bridge's address: this machine and its pods reach it, nobody else does.
        f"--bind-address={NODE_ADDRESS}",
        f"--advertise-address={NODE_ADDRESS}",
        f"--secure-port={API_PORT}",
        # It makes its own certificate there, for its address and the names that pods use.
        f"--cert-dir={keys}",
        f"--token-auth-file={keys / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={keys / 'service-accounts.key'}",
        f"--service-account-signing-key-file={keys / 'service-accounts.key'}",
        f"--kubelet-client-certificate={keys / 'kubelet-client.crt'}",
        f"--kubelet-client-key={keys / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-aggregator-routing=true",
        "--profiling=false",
        "--v=1",
        *front_proxy_flags(keys / "front-proxy"),
    ]


def _start_controllers(layout: Layout, processes: Processes, binaries: dict[str, Path]) -> None:
    for name in ("kube-controller-manager", "kube-scheduler"):
        kubeconfig = layout.kubeconfig(name)
        command = [str(binaries[name]), f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--v=1"]
        command += [f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}"]
        command += ["--bind-address=127.0.0.1", f"--cert-dir={layout.keys / name}"]
        if name == "kube-controller-manager":
            command += [
                "--use-service-account-credentials=true",
                f"--root-ca-file={layout.keys / 'apiserver.crt'}",
                f"--service-account-private-key-file={layout.keys / 'service-accounts.key'}",
                "--allocate-node-cidrs=true",
                f"--cluster-cidr={POD_NETWORK}",
                f"--service-cluster-ip-range={SERVICE_NETWORK}",
                # Scenarios wait for what these do; the defaults are made for clusters of thousands of nodes.
                "--horizontal-pod-autoscaler-sync-period=5s",
            ]
        processes.start(name, command)
