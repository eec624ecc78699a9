"""modelscope:// sources: repositories of ModelScope, by the routes of its HTTP API that its own client uses.

`source.py` is what the rest of the fetch sees, `answers.py` reads what the API answers. Must never know: where files
are published, or who asked for them.
"""
