"""The memory that weights rest in: of the device, and of the host where a GPU reads it there.

Knows nothing of files, and of how a parameter is laid out in the bytes that it gets.
"""
