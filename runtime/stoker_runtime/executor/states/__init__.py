"""What a device keeps for sequences of a model whose layers have a state: how much of it, and its copies.

`plan.py` counts, `memory.py` copies, `drafted.py` has what lets a step take drafts back.
Must never know: why a state is kept, and how states are computed.
"""
