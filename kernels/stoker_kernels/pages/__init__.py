"""Copies of whole KV pages.

Must never know: who owns a page. A new implementation: beside `triton_pages.py`, registered in `op.py`.
"""

from stoker_kernels.pages.op import copy_pages

__all__ = ["copy_pages"]
