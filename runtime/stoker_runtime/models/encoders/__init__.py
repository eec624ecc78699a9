"""Encoders: models that see a whole text at once and give a state for each of its tokens.

A new family: its reader and its row in `table.py`, what its checkpoints call their tensors in `names.py`; what its
forward pass does otherwise is a field of `spec.py` and a branch in `encoder.py`.
Must never know: decoders, what becomes of the states.
"""
