"""Pure: what is to be done and said where a replica is a group of pods: restarts of groups, what stands around them,
and the way from a Deployment to groups and back.

Must never know: how a single pod is judged, which is `plan/diagnose.py`'s, and what a group runs.
A fact that must outlive a group is a field of `Group`, which the status remembers.
"""
