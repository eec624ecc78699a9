"""KEDA's ScaledObject on the queue's depth, by KEDA itself and a Prometheus that scrapes the pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e.scenarios import stoker
from e2e.scenarios.autoscaling.test_autoscaling import AUTOSCALING, MOST, replicas, watched
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.scale_to_zero.clients import Asking
from e2e.scenarios.scale_to_zero.test_scale_to_zero import asleep, state
from e2e.scenarios.streams import streaming

SLEEPING: dict[str, Any] = {"min": 0, "scaleToZero": {"idleAfter": "20s", "maxWait": "3m"}}


def active(kube: Kube) -> dict[str, Any]:
    return stoker.conditions(kube, "model").get("AutoscalingActive", {})


@pytest.mark.usefixtures("activator")
def test_keda_raises_and_lowers_replicas_and_leaves_sleep_alone(place: Kube, install_keda: Callable[[], None]) -> None:
    scaling = AUTOSCALING | {"engine": "KEDA"}
    place.apply(stoker.service("model", autoscaling=scaling, runtime={"maxConcurrency": 2}))
    stoker.wait_ready(place, "model")
    assert active(place)["reason"] == "KedaMissing"

    install_keda()
    eventually("KEDA has taken it up", lambda: active(place).get("reason") == "SeriesFound", 180)
    assert replicas(place) == 1
    with watched(place) as values:
        with streaming(stoker.url(place, "model"), "model", clients=12) as streams:
            streams.wait_running(2)
            eventually("load raises replicas", lambda: replicas(place) == MOST, 180)
            stoker.wait_ready(place, "model")
            streams.wait_more(12)
        eventually("silence lowers replicas", lambda: replicas(place) == 1, 300)
        stoker.wait_ready(place, "model")
    assert values == [1, MOST, 1], f"replicas went {values}: two writers, or above max"
    assert place.get("hpa", "keda-hpa-model")["spec"]["maxReplicas"] == MOST, "KEDA's own, made of our ScaledObject"

    place.merge("infsvc", "model", {"spec": {"autoscaling": SLEEPING}})
    eventually("it sleeps", asleep(place), 180)
    asking = Asking(stoker.url(place, "model"), "model")
    asking.send()
    asking.wait()
    assert asking.all[0].error == ""
    eventually("it is awake", lambda: state(place).get("state") == "Awake", 120)
    eventually("KEDA goes on", lambda: active(place).get("reason") == "SeriesFound", 120)
    eventually("it sleeps again", asleep(place), 180)
