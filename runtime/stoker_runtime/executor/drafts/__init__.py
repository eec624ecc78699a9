"""Drafts on the device: the body of a verification, and a second model that drafts, its sizes and its passes.

Must never know: batches, requests, and who decides how many drafts a row may have. What one may be asked for is
`stoker_runtime.drafts`; the ops are in `stoker_kernels.drafts`.
"""
