"""plugin/canary.py: what promote and abort ask for, and the patch that moves a canary into the spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.plugin.canary import into_spec, wish
from stoker_operator.plugin.errors import PluginError

Object = dict[str, Any]
CANARY = {"steps": [5], "model": {"revision": "v7"}}
UNCHANGED = {"op": "test", "path": "/metadata/resourceVersion", "value": "4711"}


@pytest.fixture
def service(raw: Callable[..., Object]) -> Callable[..., Object]:
    def build(state: str = "", *, canary: Object | None = CANARY, notes: Object | None = None) -> Object:
        found = raw("some", model={"uri": "hf://a/b", "servedNames": ["x"]}, canary=canary)
        found["metadata"] |= {"resourceVersion": "4711"} | ({"annotations": notes} if notes is not None else {})
        found["status"] = {"canary": {"state": state, "name": "k-17"}} if state else {}
        return found

    return build


def test_a_wish_names_the_trial_and_leaves_the_spec_alone(service: Callable[..., Object]) -> None:
    added = {"op": "add", "path": "/metadata/annotations", "value": {"stoker.dev/canary": "promote k-17"}}
    assert wish(service("Passed"), "promote") == [UNCHANGED, added]
    added = {"op": "add", "path": "/metadata/annotations/stoker.dev~1canary", "value": "abort k-17"}
    assert wish(service("Promoted", notes={"a": "b"}), "abort") == [UNCHANGED, added]


@pytest.mark.parametrize(
    ("state", "verb", "says"),
    [
        ("", "promote", "has not looked at its canary yet"),
        ("Failed", "promote", "cannot be promoted: it was taken back"),
        ("Promoted", "promote", "--spec moves it into the spec"),
        ("Aborted", "abort", "cannot be taken back: it was taken back"),
        ("Returning", "abort", "cannot be taken back: it is Returning"),
    ],
)
def test_what_cannot_be_is_refused(service: Callable[..., Object], state: str, verb: str, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        wish(service(state), verb)
    with pytest.raises(PluginError, match=r"spec\.canary is not set"):
        wish(service(state, canary=None), verb)


def test_what_was_promoted_moves_into_the_spec(service: Callable[..., Object]) -> None:
    model = {"uri": "hf://a/b", "servedNames": ["x"], "revision": "v7"}
    wanted = [UNCHANGED, {"op": "add", "path": "/spec/model", "value": model}, {"op": "remove", "path": "/spec/canary"}]
    assert into_spec(service("Promoted")) == wanted
    other = service("InSpec", canary={"weight": 5, "model": {"uri": "s3://bucket/m"}})
    assert into_spec(other)[1]["value"] == {"uri": "s3://bucket/m", "servedNames": ["x"]}
    with pytest.raises(PluginError, match="promote it first"):
        into_spec(service("Running"))
