"""diagnose.py: each way a pod can fail gives a sentence that says what to change."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from stoker_operator.plan.diagnose import fetch_outcome, first_trouble, trouble_of, verify_failure
from stoker_operator.spec.service import FetchedModel, FetchFailure


def pod(
    name: str = "p",
    *,
    unschedulable: str = "",
    engine: dict[str, Any] | None = None,
    verify: dict[str, Any] | None = None,
    fetch: dict[str, Any] | None = None,
    created: str = "2026-01-01T00:00:00Z",
    unready_since: str = "",
    **status: Any,
) -> dict[str, Any]:
    found: dict[str, Any] = dict(status)
    if unready_since:
        found["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": unready_since}]
    if unschedulable:
        found["conditions"] = [{"type": "PodScheduled", "status": "False", "message": unschedulable}]
    named = {"engine": engine, "fetch": fetch}
    found["containerStatuses"] = [{"name": key, "image": "i:1"} | value for key, value in named.items() if value]
    found["initContainerStatuses"] = [{"name": "verify"} | verify] if verify else []
    return {"metadata": {"name": name, "creationTimestamp": created}, "spec": {"nodeName": "n1"}, "status": found}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}} | more


def ended(code: int, message: str = "", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "message": message} | more}


def running(restarts: int = 0, *, last: dict[str, Any] | None = None, ready: bool = False) -> dict[str, Any]:
    """A container that runs since noon."""
    state = {"running": {"startedAt": "2026-01-01T12:00:00Z"}}
    return {"state": state, "restartCount": restarts, "ready": ready, "lastState": last or {}}


LOG = """2026-11-30 22:42:06.060 INFO server: ready
2026-11-30 22:42:06.061 ERROR [api 0] server: The engine process ended with signal SIGKILL.
2026-11-30 22:42:11.067 INFO server: stopped
"""
# What the kubelet takes of a log whose last words are of daily business: 2,048 bytes, and the first line is cut.
BUSY = "67 INFO access: GET /v1/models 200\n" + "2026-11-23 22:42:11.067 INFO access: 10.0.0.7 GET /ready 200\n" * 35
AS_JSON = """{"time": "t", "level": "error", "logger": "server", "message": "no space left"}
{"time": "t", "level": "info", "logger": "access", "message": "GET /ready 200"}
"""
MISMATCH = json.dumps({"reason": "ChecksumMismatch", "message": "a.gguf differs"})
CRASHED = "2026-01-01T11:00:00Z"
AN_HOUR = {"startedAt": "2026-01-01T10:00:00Z", "finishedAt": "2026-01-01T11:00:00Z"}
A_MOMENT = {"startedAt": "2026-01-01T11:58:00Z", "finishedAt": "2026-01-01T11:59:00Z"}


CASES = {
    "no GPU": (
        pod(unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: none."),
        ("Unschedulable", False, ["no node has enough nvidia.com/gpu free", "spec.resources"]),
    ),
    "no GPU and no memory": (
        pod(unschedulable="0/2 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu."),
        ("Unschedulable", False, ["memory and nvidia.com/gpu"]),
    ),
    "unbound volume": (
        pod(unschedulable="pod has unbound immediate PersistentVolumeClaims"),
        ("Unschedulable", False, ["cache.pvc.storageClassName"]),
    ),
    "no node matches": (
        pod(unschedulable="0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."),
        ("Unschedulable", False, ["placement.nodeSelector"]),
    ),
    "queue": (
        pod(unschedulable="Scheduling is blocked due to non-empty scheduling gates"),
        ("Unschedulable", False, ["placement.queueName"]),
    ),
    "devices": (
        pod(unschedulable="0/1 nodes are available: 1 cannot allocate all claims. still bad, preemption: 0"),
        ("Unschedulable", False, ["no node has devices", "resources.claims", "(0/1 nodes are available: 1 cannot all"]),
    ),
    "cordoned, and no claims to take from others": (
        pod(unschedulable="0/1 nodes are available: 1 node(s) were unschedulable. no new claims to deallocate, x"),
        ("Unschedulable", False, ["cordoned", "were unschedulable.)"]),
    ),
    "taint": (
        pod(unschedulable="0/1 nodes are available: 1 node(s) had untolerated taint {gpu: }."),
        ("Unschedulable", False, ["placement.tolerations"]),
    ),
    "cordoned": (
        pod(unschedulable="0/1 nodes are available: 1 node(s) were unschedulable."),
        ("Unschedulable", False, ["cordoned", "kubectl uncordon"]),
    ),
    "image": (
        pod(engine=waiting("ImagePullBackOff", "manifest unknown")),
        ("ImagePullFailed", True, ["i:1", "manifest unknown", "spec.runtime.image"]),
    ),
    "secret": (
        pod(fetch=waiting("CreateContainerConfigError", 'secret "hub-token" not found')),
        ("ReferenceMissing", True, ["secret hub-token does not exist"]),
    ),
    "secret key": (
        pod(fetch=waiting("CreateContainerConfigError", "couldn't find key token in Secret default/hub-token")),
        ("ReferenceMissing", True, ["Add key token"]),
    ),
    "refused": (
        pod(engine=waiting("RunContainerError", "no such device")),
        ("ContainerRefused", True, ["no such device"]),
    ),
    "crash loop": (
        pod(
            engine=waiting(
                "CrashLoopBackOff", restartCount=4, lastState=ended(2, "starting\nConfigError: no such dtype\n")
            )
        ),
        ("CrashLoop", True, ["ended 4 times", "exit code 2: ConfigError: no such dtype.", "kubectl logs p -c engine"]),
    ),
    "first crash": (
        pod(engine={"state": ended(1, "boom"), "restartCount": 0}),
        ("PodRestarting", False, ["engine ended with exit code 1: boom. The container starts again by itself."]),
    ),
    "crash of one that ran for long": (
        pod(engine={"state": ended(1, "boom", **AN_HOUR), "restartCount": 7}),
        ("PodRestarting", False, ["exit code 1: boom."]),
    ),
    "second crash at once": (
        pod(engine={"state": ended(1, "boom", **A_MOMENT), "restartCount": 1}),
        ("CrashLoop", True, ["ended 2 times, the last time with exit code 1: boom."]),
    ),
    "loads again": (
        pod(engine=running(1, last=ended(1, "EngineDeadError: killed", **AN_HOUR)), unready_since=CRASHED),
        ("PodRestarting", False, ["exit code 1: EngineDeadError: killed.", "--previous"]),
    ),
    "loads again in a loop": (
        pod(engine=running(3, last=ended(1, "boom", **A_MOMENT)), unready_since=CRASHED),
        ("CrashLoop", True, ["ended 3 times"]),
    ),
    "last words are the last that matter": (
        pod(engine={"state": ended(1, LOG), "restartCount": 0}),
        ("PodRestarting", False, ["exit code 1: The engine process ended with signal SIGKILL. The container starts"]),
    ),
    "the end of a busy log": (
        pod(engine={"state": ended(1, BUSY), "restartCount": 0}),
        ("PodRestarting", False, ["ended with exit code 1. The container starts"]),
    ),
    "a log in JSON": (
        pod(engine={"state": ended(1, AS_JSON), "restartCount": 0}),
        ("PodRestarting", False, ["exit code 1: no space left. The container starts"]),
    ),
    "nothing that matters": (
        pod(engine={"state": ended(1, "2026-11-30 22:42:11.067 INFO server: stopped\n"), "restartCount": 0}),
        ("PodRestarting", False, ["ended with exit code 1. The container starts"]),
    ),
    "killed": (
        pod(engine=running(1, last=ended(137, **AN_HOUR)), unready_since=CRASHED),
        ("PodRestarting", False, ["ended with exit code 137 (SIGKILL). The container starts"]),
    ),
    "ended well, but ended": (
        pod(engine=running(1, last=ended(0, **AN_HOUR)), unready_since=CRASHED),
        (
            "PodRestarting",
            False,
            ["ended with exit code 0, as one that is told to end because it failed its startup or liveness probe."],
        ),
    ),
    "hangs": (
        pod(engine=running(), unready_since="2026-01-01T13:00:00Z"),
        ("PodNotReady", False, ["was ready and is not any more", "/ready", "/health", "kubectl logs p -c engine"]),
    ),
    "hangs after a restart": (
        pod(engine=running(1, last=ended(1, "boom", **AN_HOUR)), unready_since="2026-01-01T13:00:00Z"),
        ("PodNotReady", False, ["was ready"]),
    ),
    "node lost": (
        pod(engine=running(ready=True), unready_since="2026-01-01T13:00:00Z"),
        ("PodNotReady", False, ["node n1 does not report", "kubectl describe node n1"]),
    ),
    "out of memory": (
        pod(engine=waiting("CrashLoopBackOff", restartCount=2, lastState=ended(137, reason="OOMKilled"))),
        ("OutOfMemory", True, ["ended 2 times, the last time out of memory. Raise spec.resources.memory"]),
    ),
    "out of memory once": (
        pod(engine=running(1, last=ended(137, reason="OOMKilled")), unready_since=CRASHED),
        ("OutOfMemory", False, ["engine ended out of memory. Raise", "The container starts again by itself."]),
    ),
    "verify": (
        pod(verify={"state": ended(3, MISMATCH), "restartCount": 0}),
        ("CacheCorrupt", False, ["found the cache changed: ChecksumMismatch: a.gguf differs."]),
    ),
    "verify waits": (
        pod(verify=waiting("CrashLoopBackOff", restartCount=5, lastState=ended(3, MISMATCH))),
        ("CacheCorrupt", False, ["a.gguf differs."]),
    ),
    "verify runs again": (
        pod(verify=running(1, last=ended(3, MISMATCH)), engine=waiting("PodInitializing")),
        ("CacheCorrupt", False, ["a.gguf differs."]),
    ),
    "verify crashes": (
        pod(verify=waiting("CrashLoopBackOff", restartCount=2, lastState=ended(1, "Traceback\nOSError: no"))),
        ("CrashLoop", True, ["container verify ended 2 times", "exit code 1: OSError: no."]),
    ),
    "evicted": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        ("Evicted", False, ["low on resource"]),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_trouble_says_what_to_change(case: tuple[dict[str, Any], tuple[str, bool, list[str]]]) -> None:
    broken, (reason, permanent, parts) = case
    trouble = trouble_of(broken)
    assert trouble is not None
    assert (trouble.reason, trouble.permanent) == (reason, permanent)
    assert all(part in trouble.message for part in ["Pod p", *parts]), trouble.message


@pytest.mark.parametrize(
    "healthy",
    [
        pod(phase="Pending"),
        pod(engine={"state": {"running": {}}}),
        pod(engine=waiting("ContainerCreating")),
        pod(fetch={"state": ended(0, "{}")}, phase="Succeeded"),
        pod(engine=running(3, last=ended(1, "long ago"), ready=True)),
        pod(engine=running(), unready_since=CRASHED),
        pod(verify={"state": ended(0), "restartCount": 1, "lastState": ended(3, MISMATCH)}, engine=running(ready=True)),
        pod(verify=running(1, last=ended(0)), engine=waiting("PodInitializing")),
    ],
)
def test_a_healthy_pod_has_no_trouble(healthy: dict[str, Any]) -> None:
    assert trouble_of(healthy) is None


def test_of_the_schedulers_words_what_matters_is_quoted() -> None:
    text = "0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes."
    trouble = trouble_of(pod(unschedulable=text))
    assert trouble is not None
    assert trouble.message.endswith("(0/1 nodes are available: 1 Insufficient cpu.)")


def test_a_pod_whose_claims_are_not_there_says_which() -> None:
    """The scheduler does not look at such a pod, so there is no condition of its."""
    lacks = pod(phase="Pending")
    lacks["spec"] = {
        "resourceClaims": [
            {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
            {"name": "nic", "resourceClaimTemplateName": "one-nic"},
            {"name": "disk", "resourceClaimName": "shared"},
        ]
    }
    trouble = trouble_of(lacks)
    assert trouble is not None
    assert (trouble.reason, trouble.permanent) == ("Unschedulable", False)
    assert "(ResourceClaimTemplate one-gpu and ResourceClaimTemplate one-nic and ResourceClaim shared)" in trouble.said
    assert "resources.claims" in trouble.message

    lacks["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": "p-gpu-x"}, {"name": "nic"}]
    trouble = trouble_of(lacks)
    assert trouble is not None
    assert "(ResourceClaimTemplate one-nic and ResourceClaim shared)" in trouble.said
    lacks["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    assert trouble_of(lacks) is None


def test_a_permanent_trouble_comes_first() -> None:
    found = first_trouble([CASES["no GPU"][0], CASES["image"][0]])
    assert found is not None
    assert found.reason == "ImagePullFailed"


def test_the_image_of_a_model_is_told_from_that_of_a_container() -> None:
    model = "r.example/models/qwen@sha256:77"
    words = f'Back-off pulling image "{model}": ErrImagePull: failed to resolve: 401 Unauthorized'
    mounts = {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "models", "image": {"reference": model}}]}
    waits = pod(engine=waiting("ImagePullBackOff", words)) | {"spec": mounts}
    trouble = trouble_of(waits)
    assert trouble is not None
    assert (trouble.reason, trouble.permanent) == ("ImagePullFailed", True)
    for text in (model, "401 Unauthorized", "spec.model.uri", "spec.model.secretRef"):
        assert text in trouble.message
    assert "runtime.image" not in trouble.message
    other = trouble_of(pod(engine=waiting("ErrImagePull", "i:1 not found")) | {"spec": mounts})
    assert other is not None
    assert "spec.runtime.image" in other.message


def test_a_long_message_is_cut() -> None:
    trouble = trouble_of(pod(engine={"state": ended(1, "x" * 5000), "restartCount": 0}))
    assert trouble is not None
    assert len(trouble.message) < 600


def test_the_newest_report_of_a_prefetch_counts() -> None:
    report = {"resolvedRevision": "r", "digest": "sha256:a", "bytes": 1, "path": "p", "serve": "p"}
    old = pod("old", fetch={"state": ended(1, json.dumps({"reason": "HubUnreachable", "message": "m"}))})
    new = pod("new", fetch={"state": ended(0, json.dumps(report))}, created="2026-01-02T00:00:00Z")
    assert fetch_outcome([new, old]) == FetchedModel("r", "sha256:a", 1, "p", "p")
    assert fetch_outcome([old]) == FetchFailure("HubUnreachable", "m")


def test_a_prefetch_that_left_no_report_still_says_how_it_ended() -> None:
    outcome = fetch_outcome([pod(fetch={"state": ended(137, "", reason="OOMKilled")})])
    assert isinstance(outcome, FetchFailure)
    assert outcome.reason == "FetchFailed"
    assert "out of memory" in outcome.message


def test_a_running_prefetch_has_no_outcome() -> None:
    assert fetch_outcome([pod(fetch={"state": {"running": {}}})]) is None


def test_the_newest_verification_counts() -> None:
    def failing(reason: str, when: str) -> dict[str, Any]:
        return ended(3, json.dumps({"reason": reason, "message": "m"}), finishedAt=when)

    pods = [
        pod(verify={"state": failing("NotPublished", "2026-01-01T00:00:00Z")}),
        pod(verify={"state": {"running": {}}, "lastState": failing("ChecksumMismatch", "2026-01-02T00:00:00Z")}),
    ]
    assert verify_failure(pods) == (FetchFailure("ChecksumMismatch", "m"), "2026-01-02T00:00:00Z")
    assert verify_failure([pod(verify={"state": ended(0)})]) is None


@pytest.mark.parametrize("code", range(1, 256))
def test_any_exit_code_can_be_told(code: int) -> None:
    """Codes of real-time signals, too: those have no names."""
    found = trouble_of(pod(engine=running(1, last=ended(code, **AN_HOUR)), unready_since=CRASHED))
    assert found is not None
    assert f"ended with exit code {code}" in found.said
    names = {136: "SIGFPE", 139: "SIGSEGV", 152: "SIGXCPU"}
    assert code not in names or f"exit code {code} ({names[code]})." in found.said
    assert ("(SIG" in found.said) == (code in {128 + number for number in signal.Signals})


def test_a_pod_that_runs_does_not_wait_for_a_node() -> None:
    """Found with 20,000 pods: the API server answered too late that it had bound the pod, and the scheduler said so."""
    words = 'running Bind plugin "DefaultBinder": Timeout: request did not complete within requested timeout'
    bound = pod(engine=running(ready=True), phase="Running")
    bound["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": words},
        {"type": "Ready", "status": "True"},
    ]
    assert trouble_of(bound) is None
    bound["status"]["phase"] = "Pending"
    assert trouble_of(bound) is not None
