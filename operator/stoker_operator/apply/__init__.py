"""The only writer: does what a plan decided, by server-side apply, and writes the status.

`children.py` does a plan's actions, `status.py` writes a status, `events.py` tells of either, `retention.py` ends
volumes that nothing uses any more.
Must never know: why something is done; the plan carries the reasons.
A new kind of action: its class in `plan/actions.py`, its doing in `children.py`.
"""
