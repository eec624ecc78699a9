"""Images on one device: their states, once for all who show the same ones, and where their tokens stand.

`encoder.py` runs the tower and keeps what came of it, `places.py` says which rows and positions a step's images have.
Must never know: requests, templates, how images are cut into patches.
"""
