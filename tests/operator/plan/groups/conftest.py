"""A world of groups, as `world` is one of pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.plan.groups.group_world import GroupWorld

from stoker_operator.spec.service import FetchedModel, InferenceService

SPANNING = {"resources": {"gpus": 2, "nodes": 3}, "parallelism": {"tensor": 2, "pipeline": 3}}


@pytest.fixture
def groups(service: Callable[..., InferenceService], model: FetchedModel, live: Callable[..., Any]) -> Any:
    def build(**spec: Any) -> GroupWorld:
        return GroupWorld(service(**SPANNING | spec), model, live)

    return build
