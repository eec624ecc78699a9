"""Speculation as the runtime decides about it: what was asked for, and how many drafts a step is worth.

Must never know: tokens, devices, sequences. The ops are in `stoker_kernels.drafts`, the body of a verification in
`executor/`. Another method of drafting: `settings.py`.
"""
