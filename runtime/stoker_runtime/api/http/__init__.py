"""What stands between ASGI and the routes: requests, responses, events, keys, errors, pages.

Must never know: models, tokens.
"""
