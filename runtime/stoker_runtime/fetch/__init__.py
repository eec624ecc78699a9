"""Weights from where they are to where they are served: resolved once, downloaded, verified, published in one step.

`prefetch.py` reads top to bottom; `download.py` brings files, whatever `Source` they come from (`hub/`, `web.py`,
`folder.py`); `volume.py` publishes. Another place that models come from is another module with a `Source` in it.
Must never know: what weights mean, engines, requests, HTTP servers other than the one that tells progress.
"""
