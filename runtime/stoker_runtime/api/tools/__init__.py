"""Tool calls and reasoning: what may be asked, how models write them, and how they are read back.

A new family of models: a file in `parsers/`.
Must never know: bodies, routes, engines; it is given text and schemas.
"""
