"""The weights of what sees: a vision tower's, which stand beside a text model's in the same files.

Must never know: how a tower computes, the text model's weights.
"""
