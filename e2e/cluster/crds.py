"""The CustomResourceDefinitions of kinds that a cluster may have, out of the Go modules that publish them.

Invariants: a module is taken at one version, and its bytes must have the hash that stands here; Go's own cache keeps
it, nothing else is written.
Knows nothing of what the kinds are used for.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.binaries import BuildError, Say, go_command, to_stderr


@dataclass(frozen=True)
class Module:
    """A Go module at a version, the hash of its bytes (as in a go.sum), and its files that hold the definitions."""

    path: str
    digest: str
    files: tuple[str, ...]


_MONITORING = "example/prometheus-operator-crd/monitoring.coreos.com_{}.yaml"
_GATEWAY = ("backendtlspolicies", "gatewayclasses", "gateways", "grpcroutes", "httproutes", "referencegrants")
_LWS = ("sigs.k8s.io/lws@v0.9.0", "h1:DcJCgxjjoGOx//QHZkeKpyiblxYq70aCRZNYSfykWyI=")
_BASES = "config/crd/bases/{}.yaml"
_KEDA = ("github.com/kedacore/keda/v2@v2.21.0", "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=")
MODULES = {
    "gateway": Module(
        "sigs.k8s.io/gateway-api@v1.6.1",
        "h1:mock6phZbI6rvZerwrVNk7hVNymQgHo+6sJ81Ia7ftY=",
        ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",),
    ),
    # What implementations of it follow.
    "gateway-standard": Module(
        "sigs.k8s.io/gateway-api@v1.6.1",
        "h1:mock6phZbI6rvZerwrVNk7hVNymQgHo+6sJ81Ia7ftY=",
        tuple(f"config/crd/standard/gateway.networking.k8s.io_{plural}.yaml" for plural in _GATEWAY),
    ),
    "inference": Module(
        "sigs.k8s.io/gateway-api-inference-extension@v1.6.0",
        "h1:cjtwMJYcTnLXBYE5ffR1/hHhn7U1aIFfe2RITYmOXVA=",
        ("config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",),
    ),
    # What the endpoint picker follows besides, at the last version that has a picker (see `binaries.py`).
    "inference-picker": Module(
        "sigs.k8s.io/gateway-api-inference-extension@v1.5.0",
        "h1:w9Awt60cmI1vM7Y6N81h8wDCBP0WkmxpdI7GKY0v070=",
        tuple(
            f"config/crd/bases/inference.networking.x-k8s.io_inference{plural}.yaml"
            for plural in ("objectives", "modelrewrites")
        ),
    ),
    "monitoring": Module(
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        tuple(_MONITORING.format(plural) for plural in ("podmonitors", "prometheusrules")),
    ),
    "keda": Module(*_KEDA, (_BASES.format("keda.sh_scaledobjects"),)),
    # What its operator follows beside them.
    "keda-beside": Module(
        *_KEDA,
        tuple(
            _BASES.format(name)
            for name in (
                "keda.sh_scaledjobs", "keda.sh_triggerauthentications", "keda.sh_clustertriggerauthentications",
                "eventing.keda.sh_cloudeventsources", "eventing.keda.sh_clustercloudeventsources",
            )
        ),
    ),
    # A folder, for kubectl to put together: all that an installation has.
    "kueue": Module(
        "sigs.k8s.io/kueue@v0.17.0", "h1:7hzb38M4eKGzYW+CFv2s1L+swzzacUCHOCXxZmAV90I=", ("config/default",)
    ),
    "groups": Module(*_LWS, (_BASES.format("leaderworkerset.x-k8s.io_leaderworkersets"),)),
    # What their controller follows beside them.
    "groups-beside": Module(*_LWS, (_BASES.format("disaggregatedset.x-k8s.io_disaggregatedsets"),)),
    # What has an API server ask it, and changes to that, first of what changes objects, then of what checks them.
    "groups-webhooks": Module(
        *_LWS, tuple(f"config/webhook/{name}.yaml" for name in ("manifests", "mutating-patch", "validating-patch"))
    ),
}


def definitions(name: str, say: Say = to_stderr) -> list[Path]:
    """The files of one of MODULES, downloaded when Go has them not yet. Raises BuildError."""
    module = MODULES[name]
    command = [go_command(say), "mod", "download", "-json", module.path]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"Error": done.stderr.strip()}
    if "Error" in answer:
        raise BuildError(f"{module.path} cannot be had: {answer['Error']}")
    if answer["Sum"] != module.digest:
        raise BuildError(f"{module.path} has the hash {answer['Sum']}; it must be {module.digest}")
    return [Path(answer["Dir"]) / file for file in module.files]
