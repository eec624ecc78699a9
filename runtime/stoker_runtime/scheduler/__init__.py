"""Which sequences run in the next step, with which pages and slots. Pure: no torch, no I/O, no clock.

A new policy is an entry of `POLICIES` in `policy.py`. What it decides leaves as a `Batch` (`step/batch.py`).
Must never know: text, devices, processes.
"""
