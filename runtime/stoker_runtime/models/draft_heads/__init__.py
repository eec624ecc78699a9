"""Heads that draft from a model's hidden states: one decoder layer that reads a token's embedding beside the state.

Another kind of head: its spec in a module here, its tensors' names in `models/architectures/heads.py`.
Must never know: slots, pages' owners, when something is drafted.
"""
