"""podTemplate on a real kubelet: a sidecar, a volume of the engine's and one of its own, and pods spread by default."""

from __future__ import annotations

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.kube import CommandFailed, Kube, eventually

READS = "print(open('/notes/hello').read())"


def test_what_a_person_adds_runs_beside_the_engine(place: Kube, hub: stoker.Hub, given: Given) -> None:
    place.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notes"}, "data": {"hello": "from us"}})
    notes = {"name": "notes", "mountPath": "/notes", "readOnly": True}
    added = {
        "metadata": {"labels": {"team": "chat"}, "annotations": {"example.com/scrape": "true"}},
        "spec": {
            "securityContext": {"supplementalGroups": [1200]},
            "volumes": [{"name": "notes", "configMap": {"name": "notes"}}],
            "containers": [
                {"name": "engine", "volumeMounts": [notes]},
                {
                    "name": "beside", "image": given.images.hub, "command": ["python", "-c"], "volumeMounts": [notes],
                    "args": ["import time; print(open('/notes/hello').read(), flush=True); time.sleep(10**6)"],
                },
            ],
        },
    }  # fmt: skip
    place.apply(stoker.service("model", podTemplate=added))
    stoker.wait_ready(place, "model")
    (pod,) = stoker.engine_pods(place, "model")
    name, meta, spec = pod["metadata"]["name"], pod["metadata"], pod["spec"]
    assert (meta["labels"]["team"], meta["annotations"]["example.com/scrape"]) == ("chat", "true")
    assert [each["name"] for each in spec["containers"]] == ["engine", "beside"]
    assert place.run_in(name, READS).strip() == "from us"
    assert "1200" in place.run_in(name, "import os; print(os.getgroups())")
    eventually("it says what it read", lambda: "from us" in place.kubectl("logs", name, "-c", "beside"), 30)
    beside = spec["containers"][1]["securityContext"]
    assert (beside["allowPrivilegeEscalation"], beside["capabilities"]) == (False, {"drop": ["ALL"]})
    assert {each["topologyKey"] for each in spec["topologySpreadConstraints"]} == {
        "kubernetes.io/hostname", "topology.kubernetes.io/zone",
    }  # fmt: skip
    answer = stoker.ask(stoker.url(place, "model"), "model", prompt="The capital of France is", tokens=6)
    assert "Paris" in answer["choices"][0]["text"]

    # What would lower the profile is refused where it is applied; a pod is not even tried.
    loose = {"spec": {"containers": [{"name": "beside", "image": given.images.hub,
                                      "securityContext": {"privileged": True}}]}}  # fmt: skip
    with pytest.raises(CommandFailed, match="privileged"):
        place.merge("infsvc", "model", {"spec": {"podTemplate": loose}})
    assert [each["metadata"]["uid"] for each in stoker.engine_pods(place, "model")] == [meta["uid"]]

    # An empty list spreads nothing; that is a rollout.
    place.merge("infsvc", "model", {"spec": {"placement": {"topologySpread": []}}})
    eventually("another pod serves", lambda: [
        each["metadata"]["uid"] for each in stoker.engine_pods(place, "model")] != [meta["uid"]], 240)  # fmt: skip
    stoker.wait_ready(place, "model")
    (pod,) = stoker.engine_pods(place, "model")
    assert "topologySpreadConstraints" not in pod["spec"]
