"""Registries of images as sources: oci:// artifacts, whose layers are a model's files.

`source.py` reads a manifest and its layers, `access.py` logs in. Must never know: images of containers, destinations.
"""
