"""The HTTP server's application: `app.py` gathers the routers of the dialects, FastAPI finds the route.

On floors, from the top: `batch`; `messages` and `responses`, which ask the chat route; `openai` and `pooling`;
`answering` (one model that answers); `constraints`, `tools`, `generate` (tokens to text); `limits`; `http`.
Must never know: torch, kernels, how a server is started.
A new dialect: a folder whose `routes.py` has a `router`, which `app.py` includes.
"""
