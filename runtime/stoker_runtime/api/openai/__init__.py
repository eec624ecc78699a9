"""OpenAI's dialect: chat, completions, models, and the small routes beside them.

Must never know: another dialect. A new field: `protocol.py`. A new route: a module with a `router`, for `app.py`.
"""
