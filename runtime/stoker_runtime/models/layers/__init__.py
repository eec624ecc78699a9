"""The kinds of layer that the decoder is made of, each chosen by fields of the spec when the model is built.

A new kind: a field of `spec.py`, a module here, and the branch in `decoder.py`, never on values.
Must never know: which architecture has it.
"""
