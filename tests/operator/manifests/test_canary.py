"""canary.py: a canary's Deployment and Service, and whom the selectors of both sides see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tests.operator.manifests.test_manifests import EVERYTHING

from stoker_operator import manifests
from stoker_operator.manifests.identity import shared_labels
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService

Build = Callable[..., InferenceService]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
CANARY = {"canary": {"weight": 5, "runtime": {"args": ["--seed", "9"]}}}


def test_a_canary(service: Build, settings: Settings, model: FetchedModel, golden: Any) -> None:
    built = service(**CANARY)
    made = [manifests.canary_deployment(built, settings, model, 2), manifests.canary_service(built)]
    golden("canary", [*made, manifests.web_service(built, shared=True)])


def test_promoted_its_pods_differ_by_whose_they_are_alone(
    service: Build, settings: Settings, model: FetchedModel
) -> None:
    built = service(**EVERYTHING | CANARY)
    template = manifests.canary_deployment(built, settings, model, 1)["spec"]["template"]
    key = manifests.canary_key(built)
    promoted = manifests.as_served(replace(built, status={"canary": {"key": key, "state": "Promoted"}}))
    wanted = manifests.engine_template(promoted, settings, model)
    assert str(template).replace("'component': 'canary'", "").replace(": 'canary'", ": 'engine'") == str(wanted)
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == "canary"
    spread = template["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
    assert spread.items() <= template["metadata"]["labels"].items()
    assert manifests.as_served(replace(built, status={"canary": {"key": "another", "state": "Promoted"}})) == replace(
        built, status={"canary": {"key": "another", "state": "Promoted"}}
    )


def test_the_shared_service_leads_to_no_pod_of_a_job(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(**CANARY)
    pods = [
        manifests.prefetch_job(built, settings, "v", 1),
        manifests.verify_job(built, settings, model, "v", NOW),
        manifests.lookup_job(built, settings, NOW),
    ]
    serving = [{"spec": {"template": manifests.engine_template(built, settings, model)}},
               manifests.canary_deployment(built, settings, model, 1)]  # fmt: skip
    for group, seen in ((pods, False), (serving, True)):
        for manifest in group:
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert (shared_labels(built).items() <= labels.items()) is seen, manifest["kind"]
