"""Behind an API server that throttles, fails, hangs up and forgets, a service comes to the same end, and nothing is
done twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.faulty.proxy import (
    BROKEN,
    CONFLICT,
    ERROR,
    EXPIRED,
    FINE,
    FORGOTTEN,
    LAGGING,
    LOST_ANSWER,
    LOST_REQUEST,
    THROTTLED,
    Proxy,
    turns,
)
from tests.operator.reconcile.kubelet import UNSCHEDULED, Node, condition

from stoker_operator.cluster import api, kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.reconcile import Reconciler

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]
Object = dict[str, Any]
SELECTOR = "app.kubernetes.io/managed-by=stoker,app.kubernetes.io/instance=demo"
WRITES = (LOST_ANSWER, THROTTLED, ERROR, LOST_REQUEST, CONFLICT)
READS = (ERROR, LOST_REQUEST, LOST_ANSWER)
WATCHES = (EXPIRED, BROKEN, THROTTLED, LAGGING, LOST_REQUEST)


@pytest.fixture
def says(cluster: Cluster, namespace: str, eventually: Callable[..., Any]) -> Callable[..., Any]:
    """Wait until the newest generation of the service says `reason`, as the API server has it; the service."""

    async def wait(reason: str) -> Object:
        async def there() -> Object | None:
            found = await cluster.get(kinds.INFERENCE_SERVICE, namespace, "demo") or {}
            ready = condition(found, "Ready")
            newest = ready.get("observedGeneration") == found["metadata"]["generation"]
            return found if newest and ready["reason"] == reason else None

        found: Object = await eventually(there, 120)
        return found

    return wait


async def test_a_service_comes_to_the_same_end_and_nothing_is_done_twice(
    behind: Reconciler,
    proxy: Proxy,
    engine: list[Object],
    create: Callable[..., Any],
    says: Callable[..., Any],
    node: Node,
    cluster: Cluster,
    namespace: str,
) -> None:
    proxy.writes, proxy.reads, proxy.watches = turns(WRITES, 1), turns(READS, 2), turns(WATCHES, 1)
    await create(placement=UNSCHEDULED)
    await behind.cluster.list_all(kinds.SERVICE, namespace)  # the service may have come before anybody looked
    await says("Fetching")
    await node.fetch_all()
    await says("RollingOut")
    await node.run_all(1)
    await says("Serving")
    assert {FINE, *WRITES, *READS, *WATCHES} <= proxy.met, "not every fault was met"
    for kind, count in ((kinds.JOB, 1), (kinds.REPLICA_SET, 1), (kinds.CONTROLLER_REVISION, 1), (kinds.CLAIM, 1)):
        found = await cluster.list_all(kind, namespace)
        assert len(found) == count, f"{kind.plural}: {[item['metadata']['name'] for item in found]}"
    events = await cluster.list_all(kinds.EVENT, namespace)
    told = Counter(event["message"] for event in events if event.get("reportingComponent") == "stoker.dev/operator")
    assert [message for message, times in told.items() if times > 1 and message.startswith("Created")] == []


async def test_a_list_of_which_the_rest_is_forgotten_is_begun_anew(
    proxy: Proxy,
    behind: Reconciler,
    create: Callable[..., Any],
    says: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where it is so long that the API server has compacted its moment before the last page."""
    monkeypatch.setattr(api, "PAGE_ITEMS", 1)
    proxy.rests, proxy.watches = turns((FORGOTTEN, LOST_ANSWER, FORGOTTEN), 1), turns((EXPIRED,), 0)
    for name in ("first", "second", "third"):
        await create(name, placement=UNSCHEDULED)
    await create(placement=UNSCHEDULED)
    await behind.cluster.list_all(kinds.SERVICE, namespace)
    await says("Fetching")
    assert FORGOTTEN in proxy.met, "no list had a rest"
    assert len(await cluster.list_all(kinds.JOB, namespace, SELECTOR)) == 1
    assert len(await cluster.list_all(kinds.CLAIM, namespace)) == 1, "they share one volume"


async def test_a_part_that_is_away_is_named_and_made_up_for(
    behind: Reconciler,
    proxy: Proxy,
    create: Callable[..., Any],
    says: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
) -> None:
    proxy.out = lambda path: "networkpolicies/" in path
    await create(placement=UNSCHEDULED)
    await behind.cluster.list_all(kinds.SERVICE, namespace)
    said = condition(await says("ApplyFailed"), "Ready")
    assert "NetworkPolicy demo" in said["message"]
    assert await cluster.list_all(kinds.CLAIM, namespace) == [], "it began while a name could not be looked up"
    proxy.calm()
    await says("Fetching")
    assert await cluster.get(kinds.NETWORK_POLICY, namespace, "demo") is not None
