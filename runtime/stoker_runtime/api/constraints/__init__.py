"""Which constraint a body asks for: response formats, structured outputs, structural tags.

Must never know: engines, answers. A new field that constrains: `structured.py`.
"""
