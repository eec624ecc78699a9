"""manifests/fetching/lookup.py: the Job that looks up what a followed revision stands for now."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.manifests.test_manifests import EVERYTHING

from stoker_operator import manifests
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]
AT = datetime(2030, 2, 3, 4, 5, 6, tzinfo=UTC)


def test_the_job(service: Build, settings: Settings, golden: Any) -> None:
    golden("lookup", [manifests.lookup_job(service(**EVERYTHING), settings, AT, 3)])


def test_each_look_has_a_name_of_its_own_that_fits(service: Build, settings: Settings) -> None:
    longest = service("x" * 40, model={"uri": "hf://a/b", "updatePolicy": "Follow"})
    jobs = [manifests.lookup_job(longest, settings, at) for at in (AT, AT + timedelta(seconds=1))]
    names = [job["metadata"]["name"] for job in jobs]
    assert len(set(names)) == 2
    assert max(map(len, names)) <= 63


def test_it_asks_for_the_branch_whatever_commit_is_served(service: Build, settings: Settings) -> None:
    built = service(model={"uri": "hf://a/b", "revision": "dev", "updatePolicy": "Follow"}).at("c0ffee")
    [container] = manifests.lookup_pod(built, settings)["containers"]
    assert "dev" in container["args"]
    assert "c0ffee" not in container["args"]


@pytest.mark.parametrize("uri", ["s3://bucket/x", "oci://r.io/m:1", "az://box/x"])
def test_it_has_the_credentials_of_a_prefetch_and_none_of_its_volumes(
    service: Build, settings: Settings, uri: str
) -> None:
    account = "" if uri.startswith("oci") else "reader"
    source = {"uri": uri, "secretRef": {"name": "keys"}, "serviceAccountName": account, "updatePolicy": "Follow"}
    built = service(model=source)
    look, fetch = manifests.lookup_job(built, settings, AT), manifests.prefetch_job(built, settings, "v", 1)
    one, other = (job["spec"]["template"]["spec"] for job in (look, fetch))
    [asks], [brings] = one["containers"], other["containers"]
    assert one["serviceAccountName"] == other["serviceAccountName"]
    for key in ("env", "envFrom"):
        assert asks.get(key) == brings.get(key)
    assert "keys" in json.dumps(one)
    assert "persistentVolumeClaim" not in json.dumps(one)
    marks = [job["spec"]["template"]["metadata"]["labels"].get("azure.workload.identity/use") for job in (look, fetch)]
    assert marks == (["true", "true"] if uri.startswith("az") else [None, None])
    assert replace(built, model=replace(built.model, update_policy="Pinned")).model.follows == built.model.follows
