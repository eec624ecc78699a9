"""The parts of the spec that say how a service is operated, not what it serves: autoscaling, rollout,
drain, disruption.

Invariants: as in service.py: frozen, with the CRD's defaults and rules.
Knows nothing of the children an InferenceService gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.spec.reader import Reader
from stoker_operator.spec.sleeping import ScaleToZero, read_scale_to_zero


@dataclass(frozen=True, slots=True)
class ScalingRate:
    """How fast pods come or go: at most `max_pods` per `period`, after `stabilization`. Seconds."""

    stabilization: int
    max_pods: int
    period: int


@dataclass(frozen=True, slots=True)
class Targets:
    """What one pod should have of each on average; 0 = not looked at. `kv_percent` of its KV cache."""

    queued: int = 1
    running: int = 16
    kv_percent: int = 0


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Who sets the number of pods: HPA and KEDA (objects of ours), or External (whoever writes the scale)."""

    engine: str
    least: int
    most: int
    targets: Targets
    scale_up: ScalingRate
    scale_down: ScalingRate
    scale_to_zero: ScaleToZero | None = None

    @property
    def floor(self) -> int:
        """The fewest pods while any run."""
        return max(self.least, 1)

    @property
    def ours(self) -> bool:
        """Whether an object of ours sets the number of pods."""
        return self.engine != "External"


def read_autoscaling(r: Reader) -> Autoscaling:
    """spec.autoscaling."""
    targets = r.mapping("targets")
    autoscaling = Autoscaling(
        engine=r.choice("engine", ("HPA", "KEDA", "External")),
        least=r.integer("min", default=1, least=0, most=1000),
        most=r.integer("max", default=1, least=1, most=1000, required=True),
        targets=Targets(
            targets.integer("queued", default=1, least=0, most=10000),
            targets.integer("running", default=16, least=0, most=100000),
            targets.integer("kvPercent", default=0, least=0, most=100),
        ),
        scale_up=_rate(r.mapping("scaleUp"), 0, 2, 60),
        scale_down=_rate(r.mapping("scaleDown"), 300, 1, 120),
        scale_to_zero=read_scale_to_zero(r.mapping("scaleToZero")) if "scaleToZero" in r.raw else None,
    )
    if not autoscaling.ours and {"targets", "scaleUp", "scaleDown"} & r.raw.keys():
        r.problems.append(f"{r.path}: targets, scaleUp and scaleDown are of the engines HPA and KEDA")
    targets.finish()
    r.finish()
    return autoscaling


def _rate(r: Reader, stabilization: int, pods: int, period: int) -> ScalingRate:
    rate = ScalingRate(
        r.duration("stabilization", stabilization, most=3600),
        r.integer("maxPods", default=pods, least=1, most=1000),
        r.duration("period", period, least=1, most=1800),
    )
    r.finish()
    return rate


def autoscaling_problems(autoscaling: Autoscaling, replicas: int | None) -> list[str]:
    """The CRD's CEL rules about autoscaling that look at more than one field."""
    found = []
    targets = autoscaling.targets
    if autoscaling.ours and replicas is not None:
        found.append("spec.replicas: the autoscaler sets it; leave it out, or set autoscaling.engine: External")
    elif replicas and not autoscaling.least <= replicas <= autoscaling.most:
        found.append(f"spec.replicas: must be 0 or from {autoscaling.least} to {autoscaling.most}, as autoscaling says")
    if autoscaling.least > autoscaling.most:
        found.append(f"spec.autoscaling.min: is {autoscaling.least}, more than max, {autoscaling.most}")
    if not autoscaling.least and autoscaling.scale_to_zero is None:
        found.append("spec.autoscaling.min: 0 needs scaleToZero, which says when no pods run")
    if autoscaling.least and autoscaling.scale_to_zero is not None:
        found.append("spec.autoscaling.scaleToZero: needs min: 0")
    hours = autoscaling.scale_to_zero.schedule if autoscaling.scale_to_zero is not None else ()
    for index, each in enumerate(hours):
        where = f"spec.autoscaling.scaleToZero.schedule[{index}].min"
        if each.least > autoscaling.most:
            found.append(f"{where}: is {each.least}, more than autoscaling.max, {autoscaling.most}")
        elif each.least > 1 and not autoscaling.ours:
            found.append(f"{where}: must be 1 with engine: External, where whoever writes the scale sets the number")
    if not (targets.queued or targets.running or targets.kv_percent):
        found.append("spec.autoscaling.targets: at least one must be more than 0")
    return found


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """How a change reaches the pods. Seconds: `progress_deadline`, 0 = from the size of the weights; `wait_for_idle`,
    how long a change may wait for a moment with no request.
    """

    strategy: str = "Auto"
    max_surge: int = 0
    max_unavailable: int = 1
    progress_deadline: int = 0
    auto_rollback: bool = True
    paused: bool = False
    wait_for_idle: int = 0


def read_rollout(r: Reader) -> RolloutPolicy:
    """spec.rollout."""
    policy = RolloutPolicy(
        strategy=r.choice("strategy", ("Auto", "RollingUpdate", "Recreate")),
        max_surge=r.integer("maxSurge", default=0, least=0, most=100),
        max_unavailable=r.integer("maxUnavailable", default=1, least=0, most=100),
        progress_deadline=r.duration("progressDeadline", 0, most=86400),
        auto_rollback=r.boolean("autoRollback", default=True),
        paused=r.boolean("paused"),
        wait_for_idle=r.duration("waitForIdle", 0, most=86400),
    )
    if policy.strategy == "RollingUpdate":
        if not policy.max_surge and not policy.max_unavailable:
            r.problems.append(f"{r.path}: maxSurge or maxUnavailable must be more than 0")
    elif {"maxSurge", "maxUnavailable"} & r.raw.keys():
        r.problems.append(f"{r.path}: maxSurge and maxUnavailable need strategy: RollingUpdate")
    r.finish()
    return policy


@dataclass(frozen=True, slots=True)
class Drain:
    """Seconds: readiness is off and the address is being withdrawn; then running streams may finish."""

    pre_stop: int = 15
    timeout: int = 120


def read_drain(r: Reader) -> Drain:
    """spec.drain."""
    drain = Drain(r.duration("preStop", 15, most=600), r.duration("timeout", 120, most=86400))
    r.finish()
    return drain


@dataclass(frozen=True, slots=True)
class Disruption:
    """What evictions may take: pods at a time, and whether pods that still load count as ones to be spared."""

    max_unavailable: int = 1
    protect_startup: bool = False


def read_disruption(r: Reader) -> Disruption:
    """spec.disruption."""
    disruption = Disruption(
        r.integer("maxUnavailable", default=1, least=1, most=1000),
        r.boolean("protectStartup"),
    )
    r.finish()
    return disruption
