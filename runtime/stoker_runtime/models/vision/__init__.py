"""Vision towers: what turns the images of a prompt into embeddings that a decoder reads in place of its own.

A new family: its row in `table.py`, what its checkpoints call their tensors in `names.py`; what its forward pass does
otherwise is a field of `spec.py` and a branch in `tower.py`.
Must never know: decoders, requests, files of images and their formats.
"""
