"""Anthropic's Messages API over the chat route.

Must never know: templates, tokens, engines. A new field: `body.py`; what it means to the chat route: `conversation.py`.
"""
