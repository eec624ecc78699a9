"""The built-in custom metrics API: autoscalers read the engines' own gauges, with nothing else installed.

`server.py` serves it, `front_proxy.py` knows who asks and what they may, `scrape.py` reads the pods, `documents.py`
holds the API's shapes. It runs in every replica, leading or not.
Must never know: services, plans, who scales. A new series: `SERIES` in `observe/gauges.py`.
"""
