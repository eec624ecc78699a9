"""Pure: (spec, observed, settings, now) → actions with reasons, conditions, when to look again.

`plan.py` reads the parts in order: `cache.py` (volume and prefetch; `jobs.py` reads Jobs), `sleep/` (when there are no
pods), `rollout.py` (Deployment and revisions; `placing.py`: beside the old pods or in their place), `left.py` (what an
earlier source left behind), `canary/` (a second revision beside the stable one), `pods.py` (why pods are not what is
asked for), `scaling.py`, `endpoint.py`, `conditions.py`. `drift.py` compares, `diagnose.py`
explains a pod, `fit.py` does the sums, `retention.py` plans for volumes that no service uses.
Must never know: how a plan is carried out. No I/O and no clock.
A new reason of Ready: where its Finding is made; if it is a stage, not a failure, in `conditions.STAGES`, and a row
in operator/README.md's table. A new condition: its type in `conditions.TYPES`.
"""
