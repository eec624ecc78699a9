"""docs/gitops.md: what git holds is no drift once the operator has worked, and Argo CD's health is what Ready says."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.plan.actions import Finding
from stoker_operator.plan.conditions import IDLE, STAGES, ready_conditions
from stoker_operator.reconcile import Reconciler
from stoker_operator.status.status import conditions

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "crds" / "examples").glob("*.yaml"))}
# What Argo CD compares with ServerSideApply=true, and Flux's Kustomizations always.
WAY = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller")


def health(service: dict[str, Any]) -> tuple[str, str]:
    """(status, message) that the guide's script gives, in the Lua that Argo CD runs."""
    [script] = re.findall(r"```lua\n(.*?)```", (ROOT / "docs" / "gitops.md").read_text(), re.DOTALL)
    lua = LuaRuntime(register_eval=False)
    lua.globals().obj = lua.table_from(service, recursive=True)
    found = lua.execute(script)
    return found.status, found.message


def said(finding: Finding | None, *, generation: int = 7, observed: int = 7) -> dict[str, Any]:
    written = conditions({}, ready_conditions(finding, "all serve"), observed, datetime.now(UTC))
    return {"metadata": {"generation": generation}, "status": {"observedGeneration": observed, "conditions": written}}


def test_argo_cd_calls_healthy_what_serves_or_rests_by_choice() -> None:
    assert health(said(None)) == ("Healthy", "all serve")
    for reason in STAGES - {"Serving"}:
        expected = {"Suspended": "Suspended", "RolloutPaused": "Suspended"}.get(reason, "Progressing")
        expected = "Healthy" if reason in IDLE and expected == "Progressing" else expected
        assert health(said(Finding(reason, "because"))) == (expected, "because"), reason
    assert health(said(Finding("ImagePullFailed", "no such image", stalled=True))) == ("Degraded", "no such image")
    assert health(said(None, generation=8))[0] == "Progressing", "what was said of an older generation"
    assert health({"metadata": {"generation": 1}})[0] == "Progressing"


@pytest.mark.apiserver
async def test_what_git_holds_is_no_drift_once_the_operator_has_worked(
    kubectl: Callable[..., str], reconciler: Reconciler, cluster: Cluster, namespace: str
) -> None:
    """Of every example, by the API server's own comparison; `kubectl diff` ends with 1 where there is a difference."""
    for path in EXAMPLES.values():
        kubectl("apply", *WAY, "-f", str(path))
        [name] = [item["metadata"]["name"] for item in yaml.safe_load_all(path.read_text()) if item]
        await reconciler.reconcile(namespace, name)
        found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
        assert found is not None
        assert found["status"]["conditions"], "the operator has not worked"
        assert kubectl("diff", *WAY, "-f", str(path)) == ""
        assert kubectl("diff", "-f", str(path)) == ""
        kubectl("apply", *WAY, "-f", str(path))
        again = await cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
        assert again is not None
        # Who wrote when is noted anew each time, in managedFields and so in resourceVersion.
        assert again["metadata"]["generation"] == found["metadata"]["generation"]
        assert (again["spec"], again["status"]) == (found["spec"], found["status"])
