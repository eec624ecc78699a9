"""What the API server refuses before it is stored: the CRD's rules and the chart's policy, in the parser's words."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import INFERENCE_SERVICE
from stoker_operator.spec.engine_table import VLLM_UNSUPPORTED
from stoker_operator.spec.service import SpecError, parse

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
Object = dict[str, Any]


@pytest.fixture
def policy(namespace: str, kubectl: Callable[..., str]) -> Iterator[None]:
    """The chart's policy, for this namespace alone."""
    from e2e.cluster.binaries import ensure

    command = [str(ensure(["helm"])["helm"]), "template", namespace, str(ROOT / "charts" / "stoker")]
    command += ["--set=image.repository=r/o,runtime.image=r/e:1", "--show-only=templates/admission.yaml"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = [item for item in yaml.safe_load_all(rendered) if item]
    assert sorted(item["kind"] for item in made) == sorted(POLICIES)
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    for item in made:
        if item["kind"] == "ValidatingAdmissionPolicyBinding":
            item["spec"]["matchResources"] = {"namespaceSelector": here}
        kubectl("create", "-f", "-", stdin=item)
    yield
    for item in made:
        kubectl("delete", item["kind"], item["metadata"]["name"])


def named(body: Object, namespace: str, name: str = "demo") -> Object:
    return body | {"metadata": {"name": name, "namespace": namespace}}


UNSUPPORTED = min(VLLM_UNSUPPORTED)
REFUSED: list[tuple[Object, str]] = [
    ({"args": ["--max-num-batched-token", "9"]}, "'--max-num-batched-token' is no flag of the engine"),
    ({"args": ["--seed=3", "--no-such_thing=--x"]}, "'--no-such-thing' is no flag of the engine"),
    ({"args": [f"--{UNSUPPORTED}"]}, f"'--{UNSUPPORTED}' is not supported by the engine"),
    ({"env": [{"name": "STOKER_SEEED", "value": "1"}]}, "'STOKER_SEEED' is no variable of the engine"),
]


async def test_a_typo_of_the_engines_flags_is_refused_before_it_is_stored(
    policy: None,
    cluster: Cluster,
    namespace: str,
    raw: Callable[..., Object],
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    async def said(runtime: Object, name: str) -> str:
        try:
            await cluster.create(INFERENCE_SERVICE, named(raw("demo", runtime=runtime), namespace, name))
        except ApiError as error:
            return f"{error.status}: {error.message}"
        return ""

    async def enforced() -> bool:
        """The API server takes a policy up a moment after it is made."""
        return "no flag of the engine" in await said(
            {"args": ["--nothing-of-the-kind"]}, f"probe-{uuid.uuid4().hex[:8]}"
        )

    await eventually(enforced)
    for index, (runtime, words) in enumerate(REFUSED):
        answer = await said(runtime, f"bad-{index}")
        assert answer.startswith("422: ")
        assert words in answer
        with pytest.raises(SpecError) as caught:
            parse(raw("demo", runtime=runtime))
        assert words.replace("-thing'", "_thing'") in str(caught.value)
        assert not await said(runtime | {"image": "registry.example/newer:2"}, f"other-{index}")
    good = ["--no_access_log", "--dtype=bfloat16", "--max-num-batched-tokens", "4096", "---seed", "3"]
    env = [{"name": "STOKER_AOT_DIR", "value": "/x"}, {"name": "OTHER", "value": "--x"}]
    assert not await said({"args": good, "env": env}, "good")
    # What is stored is not looked at again, until its runtime changes.
    kubectl("patch", "infsvc", "other-0", "--type=merge", "-p", '{"spec": {"replicas": 2}}')
    refused = kubectl(
        "patch", "infsvc", "other-0", "--type=merge", "-p", '{"spec": {"runtime": {"image": ""}}}', check=False
    )
    assert "is no flag of the engine" in refused
