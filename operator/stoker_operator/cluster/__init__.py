"""The API server, leadership and the work queue.

`kinds.py` is the table of kinds, `api.py` the client, `lease.py` leadership, `queue.py` who is reconciled when,
`turns.py` whose pods may be disturbed.
Must never know: what the objects mean.
A new kind of child: a line in `kinds.py`, in BY_NAME or OPTIONAL, and in the chart's rights.
"""
