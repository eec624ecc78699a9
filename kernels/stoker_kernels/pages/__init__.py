"""Copies of whole KV pages.

Must never know: who owns a page.
"""

from stoker_kernels.pages.op import copy_pages

__all__ = ["copy_pages"]
