"""identity.py: a manifest's hash is that of Python's own JSON, by which objects in clusters were stamped."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.manifests.identity import short_hash

_NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(0.001, 1e6) | st.floats(-1e6, -0.001)
_PLAIN = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(_PLAIN)
def test_the_hash_is_the_one_that_live_objects_carry(value: Any) -> None:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    assert short_hash(value, 64) == hashlib.sha256(text.encode()).hexdigest()
