"""What to do about each reason of Ready, in a few words; the condition's own message has the names.

Invariants: pure; every reason that is no stage on the way has a row (a test compares them with the operator's source).
Knows nothing of services.
"""

from __future__ import annotations

from stoker_operator.plan.conditions import IDLE, STAGES

_BY_ITSELF = "nothing: it heals by itself, and the message tells how far it is"
_ADVICE = {
    "Serving": "use it: kubectl stoker chat NAME",
    "Suspended": "by choice; spec.suspend: false runs pods again",
    "ScaledToZero": "by choice; raise spec.replicas to run pods again",
    "Asleep": "by choice; a request wakes it, and so does kubectl stoker wake NAME",
    "RolloutPaused": "by choice; spec.rollout.paused: false lets the change through",
    "Deleting": "wait; its children go with it",
    "ApplyFailed": "ask who owns the quota, the policy or the name that the message has",
    "SpecInvalid": "correct the field that the message names",
    "DoesNotFit": "compare GPUs: kubectl stoker fit NAME",
    "CrashLoop": "read its last words: kubectl stoker logs NAME",
    "OutOfMemory": "raise spec.resources.memory, or lower spec.runtime.contextLength",
    "ContainerRefused": "correct what the message names",
    "ReferenceMissing": "create the Secret, ConfigMap or key that the message names",
    "ImagePullFailed": "check the image's name, its registry, and podTemplate.spec.imagePullSecrets",
    "Unschedulable": "free or add what the message names; check spec.placement and spec.resources.gpuProducts",
    "PodRefused": "look at the Job that the message names: a ResourceQuota, a LimitRange or a webhook",
    "PodRestarting": _BY_ITSELF,
    "PodNotReady": _BY_ITSELF,
    "GroupRestarting": _BY_ITSELF,
    "LeaderWorkerSetMissing": "install LeaderWorkerSet in the cluster, or set spec.resources.nodes to 1",
    "PodWarns": "do what the message says; the service goes on serving",
    "CacheCorrupt": _BY_ITSELF,
    "ChecksumMismatch": "nothing yet: it is tried again; if it stays, the source is wrong",
    "HubUnreachable": "nothing: it is tried again, ever more seldom; deleting the prefetch Job tries at once",
    "FetchFailed": "nothing: it is tried again, ever more seldom; deleting the prefetch Job tries at once",
    "Interrupted": "nothing: it is tried again",
    "TokenRejected": "put a token, or keys, with access into the Secret of spec.model.secretRef",
    "RevisionNotFound": "correct spec.model.revision",
    "ModelNotFound": "correct spec.model.uri; a private model needs spec.model.secretRef",
    "BadRequest": "correct the field that the message names",
    "VolumeFull": "raise spec.cache.pvc.size, or name fewer files in spec.model.files",
    "NodeFull": "free disk on the nodes that the message names, or raise what the node cache may take",
    "FeatureOff": "switch on the chart's feature that the message names, or leave the field out",
    "VolumeMissing": "create the claim that the message names",
    "VolumeTerminating": "wait for the pods that use it; it is made anew",
    "NoAnswer": "look for a NetworkPolicy between the operator and the pods",
    "RolledBack": "correct what the message names; kubectl stoker rollback NAME makes the spec say what runs",
    "RolloutFailed": "correct what the message names",
}


def advice(reason: str, name: str) -> str:
    """What to do now about the service `name`."""
    if not reason:
        return "see whether the operator runs: kubectl get pods -A -l app.kubernetes.io/name=stoker-operator"
    known = _ADVICE.get(reason)
    if known is not None:
        return known.replace("NAME", name)
    if reason in IDLE:
        return "by choice"
    return "wait; the message tells how far it is" if reason in STAGES else "what the message says"


def is_covered(reason: str) -> bool:
    """Whether the reason has words of its own, or is a stage, of which waiting is the answer."""
    return reason in _ADVICE or reason in STAGES
