"""OpenAI's Responses API over the chat route, with the responses that clients may ask for again.

Must never know: templates, tokens, engines. A new field: `body.py`; what it means to the chat route: `conversation.py`.
"""
