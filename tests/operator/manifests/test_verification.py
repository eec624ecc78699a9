"""manifests/verification.py: the Job that hashes a model again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.operator.manifests.test_manifests import EVERYTHING

from stoker_operator import manifests
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
AT = datetime(2030, 2, 3, 4, 5, 6, tzinfo=UTC)


def test_the_job(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    built = service(**(EVERYTHING | {"cache": {"verify": "Scheduled"}}))
    golden("verification", [manifests.verify_job(built, settings, model, "uid-volume", AT)])


def test_each_run_has_a_name_of_its_own_that_fits(service: Build, settings: Settings, model: FetchedModel) -> None:
    longest = service("x" * 40, cache={"verify": "Scheduled"})
    times = [AT, AT + timedelta(seconds=1)]
    names = [manifests.verify_job(longest, settings, model, "v", at)["metadata"]["name"] for at in times]
    assert len(set(names)) == 2
    assert max(map(len, names)) <= 63


def test_it_writes_nothing_and_asks_for_no_gpu(service: Build, settings: Settings, model: FetchedModel) -> None:
    for uri in ("hf://a/b", "pvc://mine/dir"):
        built = service(model={"uri": uri}, resources={"gpus": 1}, cache={"verify": "Scheduled"})
        pod = manifests.verify_pod(built, settings, model)
        [container] = pod["containers"]
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
        assert mount["readOnly"] is True
        assert set(container["resources"]["limits"]) == {"memory"}
        assert [item["name"] for item in container["env"]] == ["HOME"]
