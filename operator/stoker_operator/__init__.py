"""Stoker's operator: turns InferenceService objects into running, verified model servers.

A reconcile enters the rooms in this order: `spec/` → `observe/` → `plan/` (which builds `manifests/`) → `apply/` →
`status/`; `reconcile.py` reads so. `handlers.py` says what is reconciled, `cluster/` is the API server, `local/` and
`metrics_adapter/` run beside. A new room goes onto a floor of the contract in pyproject.toml.
Must never know: torch, and how the runtime does what its contract says.
"""
