"""A model's adapters: fetched to its volume (`fetches.py`), listed for the pods that serve them (`plan.py`).

Must never know: how an engine serves adapters. Another way in which one can stand is a state in `plan.py`, with a row
in docs/adapters.md.
"""
