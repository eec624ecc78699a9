"""Registries of images as sources: oci:// artifacts, whose layers are a model's files, and images with a model in them.

`source.py` reads an artifact's layers, `image.py` what an image says of itself, both of a `repository.py`; `access.py`
logs in; `layout.py` writes an image. Must never know: how containers use an image, where artifacts' files go.
"""
