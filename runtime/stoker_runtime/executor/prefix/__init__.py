"""Decode steps whose rows begin with the same pages: which steps they are, and what they need on the device.

`plan.py` says for which models and how much memory, `pages.py` knows how many pages rows have in common, `steps.py`
chooses the steps that attend those once for all rows.
Must never know: prompts, and why rows share pages.
"""
