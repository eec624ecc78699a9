"""manifests/cache.py: which services share a volume, what of it is kept, how it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.manifests.cache import services_of
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService

Build = Callable[..., InferenceService]


def test_services_with_one_source_share_a_volume_and_its_ownership(service: Build, settings: Settings) -> None:
    one, two = service("one"), replace(service("two"), uid="uid-2")
    assert manifests.claim_name(one) == manifests.claim_name(two)
    first = manifests.volume_claim(one, settings)
    both = manifests.volume_claim(two, settings, first)
    kind = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService"}
    owners = [kind | {"name": "one", "uid": "uid-1"}, kind | {"name": "two", "uid": "uid-2"}]
    assert both["metadata"]["ownerReferences"] == owners
    assert manifests.volume_claim(one, settings, both) == both
    assert manifests.left_claim(one, both) == manifests.volume_claim(two, settings)


def test_a_volume_that_is_to_be_retained_has_no_owner(service: Build, settings: Settings) -> None:
    one, two = service("one"), replace(service("two", cache={"retain": "1h"}), uid="uid-2")
    claim = manifests.volume_claim(two, settings, manifests.volume_claim(one, settings))
    assert claim["metadata"]["ownerReferences"] == []
    assert manifests.claim_users(claim) == {"one": ("uid-1", 0), "two": ("uid-2", 3600)}
    assert manifests.retain_seconds(claim) == 3600
    assert manifests.volume_claim(one, settings, claim) == claim  # the other one's wish holds
    taken_back = manifests.volume_claim(replace(two, cache=replace(two.cache, retain=0)), settings, claim)
    assert [item["name"] for item in taken_back["metadata"]["ownerReferences"]] == ["one", "two"]


def test_a_user_that_is_gone_goes_from_the_volume_too(service: Build, settings: Settings) -> None:
    one, two = service("one"), replace(service("two"), uid="uid-2")
    both = manifests.volume_claim(two, settings, manifests.volume_claim(one, settings))
    both["metadata"]["ownerReferences"].pop(0)  # the garbage collector's work
    assert manifests.claim_users(manifests.volume_claim(two, settings, both)) == {"two": ("uid-2", 0)}


def test_a_claim_of_an_earlier_version_keeps_its_owners(service: Build, settings: Settings) -> None:
    one, two = service("one"), replace(service("two"), uid="uid-2")
    claim = manifests.volume_claim(one, settings)
    claim["metadata"]["annotations"] = {}
    found = manifests.volume_claim(two, settings, claim)
    assert [item["uid"] for item in found["metadata"]["ownerReferences"]] == ["uid-1", "uid-2"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"uri": "hf://org/other"}},
        {"model": {"uri": "hf://org/model", "revision": "v2"}},
        {"model": {"uri": "hf://org/model", "files": {"allow": ["*.gguf"]}}},
        {"cache": {"pvc": {"storageClassName": "fast"}}},
    ],
)
def test_another_source_is_another_volume(service: Build, change: dict[str, Any]) -> None:
    assert manifests.claim_name(service(**change)) != manifests.claim_name(service())


def test_a_volume_grows_and_never_shrinks(service: Build, settings: Settings) -> None:
    live = manifests.volume_claim(service(cache={"pvc": {"size": "20Gi"}}), settings)

    def size(text: str) -> str:
        wanted = manifests.volume_claim(service(cache={"pvc": {"size": text}}), settings, live)
        return str(wanted["spec"]["resources"]["requests"]["storage"])

    assert (size("10Gi"), size("30Gi"), size("20480Mi")) == ("20Gi", "30Gi", "20Gi")


def test_a_changed_default_class_leaves_live_volumes_alone(service: Build) -> None:
    live = manifests.volume_claim(service(), Settings(cache_storage_class="old"))
    managed = {"manager": "stoker-operator", "fieldsV1": {"f:spec": {"f:storageClassName": {}}}}
    ours = live | {"metadata": live["metadata"] | {"managedFields": [managed]}}
    theirs = live | {"metadata": live["metadata"] | {"managedFields": [managed | {"manager": "admission"}]}}
    later = Settings(cache_storage_class="new")
    assert manifests.volume_claim(service(), later, ours)["spec"]["storageClassName"] == "old"
    assert "storageClassName" not in manifests.volume_claim(service(), later, theirs)["spec"]


def test_a_replaced_volume_is_filled_again(service: Build) -> None:
    assert manifests.source_id(service(), "uid-1") != manifests.source_id(service(), "uid-2")


def test_the_longest_name_leaves_room_for_a_job(service: Build, settings: Settings) -> None:
    job = manifests.prefetch_job(service("a" * 40), settings, "v", 9999)
    assert len(job["metadata"]["name"]) <= 63


REFERENCE = {"kind": "InferenceService", "name": "owner"}


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"ownerReferences": [REFERENCE]}, {"owner"}),
        ({"labels": {"app.kubernetes.io/instance": "demo"}}, {"demo"}),
        ({"ownerReferences": [{"kind": "ReplicaSet", "name": "rs"}], "labels": {}}, set()),
        ({"ownerReferences": [REFERENCE, REFERENCE | {"name": "other"}]}, {"owner", "other"}),
        ({"annotations": {"user.stoker.dev/demo": "uid-1 60", "a/b": "c"}}, {"demo"}),
        ({}, set()),
    ],
)
def test_the_services_that_an_object_concerns(meta: dict[str, Any], expected: set[str]) -> None:
    assert services_of(meta) == expected
