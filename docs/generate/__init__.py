"""Writes docs/reference from the code: `make docs`, or `python -m docs.generate`.

A new page is a module with `page() -> str` and a line in `__main__.py`. `tests/docs/test_references.py` fails when a
page on disk is not what the code gives.
Must never know: anything that the code does not say itself; what explains is written by hand, in the guides.
"""
