"""From a checked body to sequences in the engine, and from their tokens to text.

Must never know: JSON, HTTP, dialects. A new sampling parameter: `sampling.py`.
"""
