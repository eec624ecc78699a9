"""A real etcd and kube-apiserver on loopback, for tests. Standard library only.

    running = start(folder)                  # folder: state, keys and logs; its kubeconfig is running.kubeconfig
    running = start(folder, controllers=["garbage-collector-controller", "namespace-controller"])
    …
    running.stop()

With KUBECONFIG set, that cluster is used instead and `stop` leaves it alone.

Invariants: listens on 127.0.0.1 only, on free ports; all state is below the folder; `stop` ends every process that
`start` started, in the reverse order. There is no node: objects are stored, validated and watched, and nothing runs.
"""

from __future__ import annotations

import atexit
import base64
import http.client
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.binaries import Say, ensure, to_stderr
from e2e.cluster.processes import StartError

_READY_SECONDS = 120.0
_STOP_SECONDS = 10.0


@dataclass
class Running:
    """A cluster to talk to. `kubeconfig` is a file with cluster-admin rights; `url` is "" for a cluster of the
    user's.
    """

    kubeconfig: Path
    url: str = ""
    token: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def stop(self) -> None:
        """End what `start` started; calling it twice does no harm."""
        atexit.unregister(self.stop)
        while self.processes:
            _, process = self.processes.popitem()
            end(process)


def start(
    folder: Path,
    *,
    controllers: Sequence[str] = (),
    controller_flags: Sequence[str] = (),
    front_proxy: bool = False,
    say: Say = to_stderr,
) -> Running:
    """Start etcd, kube-apiserver and, when `controllers` are named, kube-controller-manager with those alone.

    `front_proxy` lets APIServices with a backend of their own be registered; it needs the openssl command.
    Raises BuildError when binaries cannot be had, StartError when one does not come up.
    """
    given = os.environ.get("KUBECONFIG", "")
    if given:
        return Running(Path(given.split(os.pathsep)[0]))
    names = ["etcd", "kube-apiserver", *(["kube-controller-manager"] if controllers else [])]
    binaries = ensure(names, say)
    folder.mkdir(parents=True, exist_ok=True)
    running = Running(folder / "kubeconfig")
    atexit.register(running.stop)
    try:
        _start_etcd_and_apiserver(running, folder, binaries, front_proxy)
        if controllers:
            _start_controllers(
                running, folder, binaries["kube-controller-manager"], [*_only(controllers), *controller_flags]
            )
    except BaseException:
        running.stop()
        raise
    return running


def _start_etcd_and_apiserver(running: Running, folder: Path, binaries: dict[str, Path], front_proxy: bool) -> None:
    client, peer, secure = free_ports(3)
    etcd = f"http://127.0.0.1:{client}"
    command = [str(binaries["etcd"]), "--name=test", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"]
    command += [f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", "--log-level=warn"]
    address = f"http://127.0.0.1:{peer}"
    command += [
        f"--listen-peer-urls={address}",
        f"--initial-advertise-peer-urls={address}",
        f"--initial-cluster=test={address}",
    ]
    running.processes["etcd"] = spawn(command, folder / "etcd.log")
    running.url, running.token = f"https://127.0.0.1:{secure}", secrets.token_urlsafe(24)
    keys = _write_keys(folder, running.token)
    command = [str(binaries["kube-apiserver"]), f"--etcd-servers={etcd}", *_apiserver_flags(folder, keys, secure)]
    command += front_proxy_flags(folder / "front-proxy") if front_proxy else []
    running.processes["kube-apiserver"] = spawn(command, folder / "kube-apiserver.log")
    certificate = folder / "tls" / "apiserver.crt"
    _wait(
        running,
        folder,
        "kube-apiserver",
        lambda: certificate.exists() and answers(running.url, "/readyz", certificate, running.token),
    )
    write_kubeconfig(running.kubeconfig, running.url, certificate, running.token)


def _apiserver_flags(folder: Path, keys: Path, secure: int) -> list[str]:
    return [
        "--bind-address=127.0.0.1",
        f"--secure-port={secure}",
        # Nothing runs behind this address; it must only not be loopback, and the server's own pick needs a network
        # card.
        "--advertise-address=192.0.2.1",
        "--endpoint-reconciler-type=none",
        # It makes and signs its own certificate here, so that no certificate tool is needed.
        f"--cert-dir={folder / 'tls'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={keys}",
        f"--service-account-signing-key-file={keys}",
        "--profiling=false",
        # Nobody would be there to make each namespace's default service account.
        "--disable-admission-plugins=ServiceAccount",
        "--v=1",
    ]


def front_proxy_flags(folder: Path) -> list[str]:
    """The authority that backends of APIServices trust, and the client certificate that the API server shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
    openssl("req", "-x509", *key, "-subj", "/CN=front-proxy-ca", "-keyout", "ca.key", "-out", "ca.crt", cwd=folder)
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "extendedKeyUsage=clientAuth"]
    name = "front-proxy-client"
    openssl(
        "req", "-x509", *key, "-subj", f"/CN={name}", *signed, "-keyout", "client.key", "-out", "client.crt", cwd=folder
    )
    return [
        f"--requestheader-client-ca-file={folder / 'ca.crt'}",
        f"--requestheader-allowed-names={name}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={folder / 'client.crt'}",
        f"--proxy-client-key-file={folder / 'client.key'}",
    ]


def openssl(*arguments: str, cwd: Path) -> None:
    """Run openssl in `cwd`. Raises StartError with its own words."""
    try:
        done = subprocess.run(["openssl", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise StartError("the openssl command is missing; install the package openssl") from None
    if done.returncode:
        raise StartError(f"openssl {arguments[0]}: {done.stderr.strip()}")


def self_signed(folder: Path, subject: str, names: str) -> Path:
    """A certificate that is its own authority, for `names` (as subjectAltName has them), and its key beside it: tls.crt
    and tls.key, which controllers look for. Raises StartError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"]
    about = ["-subj", f"/CN={subject}", "-addext", f"subjectAltName={names}"]
    openssl("req", "-x509", *key, *about, "-keyout", "tls.key", "-out", "tls.crt", cwd=folder)
    return folder / "tls.crt"


def _only(controllers: Sequence[str]) -> list[str]:
    return [f"--controllers={','.join(controllers)}"]


def _start_controllers(running: Running, folder: Path, binary: Path, flags: Sequence[str]) -> None:
    (secure,) = free_ports(1)
    command = [str(binary), f"--kubeconfig={running.kubeconfig}", *flags]
    command += ["--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={secure}", "--v=1"]
    command += [f"--authentication-kubeconfig={running.kubeconfig}", f"--authorization-kubeconfig={running.kubeconfig}"]
    command += [f"--cert-dir={folder / 'tls'}"]
    running.processes["kube-controller-manager"] = spawn(command, folder / "kube-controller-manager.log")
    certificate = folder / "tls" / "kube-controller-manager.crt"
    url = f"https://127.0.0.1:{secure}"
    _wait(
        running,
        folder,
        "kube-controller-manager",
        lambda: certificate.exists() and answers(url, "/healthz", certificate, running.token),
    )


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C in a test run does not reach it before `stop`."""
    # A fifth of what these processes compute is the collection of their garbage, of which tests make little.
    environment = {"GOGC": "400", "GOMEMLIMIT": "900MiB"} | os.environ
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, env=environment
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL when that was not heard."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def answers(url: str, path: str, certificate: Path, token: str) -> bool:
    """Does GET answer 200 now?"""
    host, _, port = url.removeprefix("https://").partition(":")
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(host, int(port), timeout=2, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False


def write_kubeconfig(path: Path, url: str, certificate: Path, token: str) -> None:
    """A kubeconfig with one cluster, one user and one context."""
    authority = base64.b64encode(certificate.read_bytes()).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "stoker",
        "clusters": [{"name": "stoker", "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "stoker", "context": {"cluster": "stoker", "user": "admin"}}],
    }
    with open(path, "w", opener=private) as stream:
        json.dump(document, stream, indent=1)


def _wait(running: Running, folder: Path, name: str, ready: Callable[[], bool]) -> None:
    end_of_wait = time.monotonic() + _READY_SECONDS
    while not ready():
        for other, process in running.processes.items():
            if process.poll() is not None:
                raise StartError(f"{other} ended with status {process.returncode}:\n{_tail(folder / f'{other}.log')}")
        if time.monotonic() > end_of_wait:
            raise StartError(f"{name} is not ready after {_READY_SECONDS:.0f} s:\n{_tail(folder / f'{name}.log')}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _write_keys(folder: Path, token: str) -> Path:
    """The admin's token, and the key that signs service accounts' tokens."""
    with open(folder / "tokens.csv", "w", opener=private) as stream:
        stream.write(f"{token},admin,admin,system:masters\n")
    path = folder / "service-accounts.key"
    with open(path, "w", opener=private) as stream:
        stream.write(elliptic_key())
    return path


def private(name: str, flags: int) -> int:
    """An opener for files that only their owner may read."""
    return os.open(name, flags, 0o600)


def elliptic_key() -> str:
    """A fresh P-256 private key as SEC 1 PEM (RFC 5915); the public half may be left out, readers derive it."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    scalar = (secrets.randbelow(order - 1) + 1).to_bytes(32, "big")
    curve = bytes.fromhex("06082a8648ce3d030107")
    body = b"\x02\x01\x01" + b"\x04\x20" + scalar + b"\xa0" + bytes([len(curve)]) + curve
    text = base64.b64encode(b"\x30" + bytes([len(body)]) + body).decode()
    lines = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return f"-----BEGIN EC PRIVATE KEY-----\n{lines}\n-----END EC PRIVATE KEY-----\n"
