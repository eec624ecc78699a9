"""Layers with a window that give up KV pages: which pages layers lie in, and the page tables of those.

`layout.py` decides it by arithmetic, and says where all pages are kept and why; `tables.py` is what of it a step needs
on the device. Which pages a sequence holds is the scheduler's (`scheduler/near.py`).
Must never know: sequences, policies.
"""
