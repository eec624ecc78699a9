"""One immutable snapshot of everything a plan may depend on: children, pods, nodes, what pods say of themselves.

`observe.py` takes it, from the watched children (`mirror.py`, which keeps them in `shelf.py`) and from pods
(`pod_http.py`); `standby.py` fills the mirror before a replica leads; `pulse.py` notices pods that fall silent. The
rest is pure and is all that other rooms see of it: `snapshot.py` holds its types, `rollout.py`, `capacity.py`, `gpu.py`
and `gauges.py` say what pods, nodes and pages of metrics tell.
Must never know: what should be done. A new fact: a field of `snapshot.Observed`, filled in `observe.py`.
"""
