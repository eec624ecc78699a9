"""Every field of the designed InferenceService is in the CRD, or docs/upgrade.md says what is in its place, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "stoker.dev_inferenceservices.yaml").read_text())
GUIDE = (ROOT / "docs" / "upgrade.md").read_text(encoding="utf-8")
# The object as it was designed, each part with its fields.
DESIGNED = """
spec: suspend replicas
spec.model: uri revision updatePolicy servedNames secretRef.name endpoint files.allow files.ignore sha256 quantization
  kvCacheDtype adapters.name adapters.uri adapters.revision
spec.runtime: image args env envFrom contextLength maxConcurrency shmSize warmup.enabled
spec.parallelism: tensor pipeline
spec.resources: gpus nodes gpuResource gpuProducts claims cpu memory ephemeralStorage fitCheck
spec.placement: nodeSelector tolerations affinity topologySpread runtimeClassName priorityClassName schedulerName
  queueName
spec.cache: mode pvc.storageClassName pvc.size pvc.accessMode pvc.existingClaim retain verify
spec.autoscaling: engine min max targets.queued targets.running targets.kvPercent scaleUp.stabilization scaleUp.maxPods
  scaleUp.period scaleDown.stabilization scaleDown.maxPods scaleDown.period scaleToZero.idleAfter scaleToZero.maxQueued
  scaleToZero.maxWait
spec.rollout: strategy maxSurge maxUnavailable waitForIdle progressDeadline autoRollback paused
spec.canary: weight steps model.revision runtime
spec.drain: preStop timeout
spec.disruption: maxUnavailable protectStartup
spec.endpoint: port httpRoute.parentRefs httpRoute.hostnames ingress.className ingress.host inferencePool tls.secretName
  auth.apiKeysSecretRef rateLimit.requestsPerMinute rateLimit.tokensPerMinute networkPolicy
spec.observability: podMonitor rules dashboard otlpEndpoint
spec.podTemplate: metadata spec
status: observedGeneration url replicas readyReplicas updatedReplicas terminatingReplicas selector conditions
status.model: resolvedRevision digest bytes
status.cache: mode bytesDone bytesTotal etaSeconds
status.fit: weightsGiB kvGiB requiredGiB gpuGiB verdict
status.startup: scheduleSeconds fetchSeconds loadSeconds warmupSeconds
status.revisions: current previous failed
status.scaling: desired lastSample
"""
COLUMNS = ["Ready", "Servable", "Reason", "Replicas", "Updated", "Model", "Rev", "GPUs", "Cache", "Age", "URL"]
CONDITIONS = [
    "Ready", "Servable", "Progressing", "Degraded", "Reconciling", "Stalled", "ModelResolved", "ModelCached", "Fits",
    "Scheduled", "EndpointReady", "AutoscalingActive",
]  # fmt: skip
# Defaults that the design wrote down.
DEFAULTS = {
    "spec.model.revision": "main",
    "spec.model.updatePolicy": "Pinned",
    "spec.runtime.contextLength": 8192,
    "spec.runtime.shmSize": "",
    "spec.resources.gpuResource": "nvidia.com/gpu",
    "spec.resources.fitCheck": "Enforce",
    "spec.resources.nodes": 1,
    "spec.cache.mode": "Auto",
    "spec.cache.pvc.accessMode": "ReadWriteOnce",
    "spec.cache.retain": "24h",
    "spec.cache.verify": "OnDownload",
    "spec.autoscaling.engine": "HPA",
    "spec.autoscaling.min": 1,
    "spec.autoscaling.targets.queued": 1,
    "spec.autoscaling.targets.running": 16,
    "spec.autoscaling.targets.kvPercent": 0,
    "spec.autoscaling.scaleUp.period": "60s",
    "spec.autoscaling.scaleDown.stabilization": "300s",
    "spec.autoscaling.scaleDown.period": "120s",
    "spec.autoscaling.scaleToZero.idleAfter": "15m",
    "spec.autoscaling.scaleToZero.maxQueued": 100,
    "spec.autoscaling.scaleToZero.maxWait": "10m",
    "spec.rollout.strategy": "Auto",
    "spec.rollout.progressDeadline": "30m",
    "spec.rollout.autoRollback": True,
    "spec.drain.preStop": "15s",
    "spec.drain.timeout": "120s",
    "spec.disruption.maxUnavailable": 1,
    "spec.disruption.protectStartup": True,
    "spec.endpoint.port": 8000,
    "spec.endpoint.networkPolicy": True,
    "spec.observability.podMonitor": "Auto",
    "spec.observability.rules": True,
    "spec.observability.dashboard": True,
}
PLACED = {name.strip("`"): (instead, why) for name, instead, why in re.findall(
    r"^\| (`(?:spec|status)[\w.]+`) \| (.+) \| (.+) \|$", GUIDE, re.MULTILINE)}  # fmt: skip


def designed() -> Iterator[str]:
    for part, names in re.findall(r"^(\S+): (.+(?:\n  .+)*)", DESIGNED, re.MULTILINE):
        yield from (f"{part}.{name}" for name in names.split())


def field(path: str) -> dict[str, Any] | None:
    """The schema of a field; None where there is none, or one that is there only to be refused."""
    found: Any = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        found = found["items"] if found.get("type") == "array" else found
        found = found.get("properties", {}).get(name)
        if found is None or any(rule["rule"] == "false" for rule in found.get("x-kubernetes-validations", ())):
            return None
    return dict(found)


@pytest.mark.parametrize("path", list(designed()))
def test_a_designed_field_works_or_was_argued_out(path: str) -> None:
    there = field(path) is not None
    argued = any(path == name or path.startswith(f"{name}.") for name in PLACED)
    assert there or argued, f"{path} is neither in the CRD nor in the table of docs/upgrade.md"


@pytest.mark.parametrize("path", DEFAULTS)
def test_a_designed_default_holds_or_was_argued(path: str) -> None:
    schema = field(path)
    assert schema is not None
    if path in PLACED:
        assert schema.get("default") != DEFAULTS[path], f"{path} is as designed: it needs no row"
    else:
        assert schema.get("default") == DEFAULTS[path]


@pytest.mark.parametrize("path", PLACED)
def test_a_row_of_the_table_is_of_the_design_and_gives_a_reason(path: str) -> None:
    known = [*designed(), *DEFAULTS]
    assert any(name == path or name.startswith(f"{path}.") for name in known)
    instead, why = PLACED[path]
    assert len(instead) > 3
    assert len(why) > 20
    for name in re.findall(r"`((?:spec|status)\.[\w.]+)`", instead):
        assert field(name) is not None, f"{name} stands in its place and is not in the CRD"


def test_the_reader_of_a_list_sees_the_designed_columns_and_conditions() -> None:
    version = CRD["spec"]["versions"][0]
    assert [column["name"] for column in version["additionalPrinterColumns"]][: len(COLUMNS)] == COLUMNS
    assert version["subresources"]["scale"]["statusReplicasPath"] == ".status.replicas"
    guide = (ROOT / "docs" / "reference" / "conditions.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide or f"## {name}" in guide for name in CONDITIONS)
