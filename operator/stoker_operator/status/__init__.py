"""Pure: a plan and what was observed → the status: conditions, columns, words.

`status.py` is the whole, `startup.py` how long a revision took to start.
Must never know: how it is written, and what is done next. A new field of the status: here and in the CRD.
"""
