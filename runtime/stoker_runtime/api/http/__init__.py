"""What lies between the socket and the dialects: fields of bodies, keys, errors, ids, pages, events, the document.

FastAPI routes; here is what it is told. Must never know: models, tokens, engines.
A field that several routes share goes to `fields.py`, a new kind of error to `stoker_runtime/errors.py`.
"""
