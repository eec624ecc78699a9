"""Stoker's operator: turns InferenceService objects into running, verified model servers.

A reconcile enters the rooms in this order: `spec/` → `observe/` → `plan/` (which builds `manifests/`) → `apply/` →
`status/`; `reconcile.py` reads so. `handlers.py` says what is reconciled, `cluster/` is the API server, `local/` and
`metrics_adapter/` run beside. Never imports torch.
"""
