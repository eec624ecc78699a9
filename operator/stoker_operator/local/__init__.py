"""`stoker up`: the same reconciler against a store on this machine, whose controllers start processes.

`up.py` is the command; `store.py` plays the API server, `controllers.py` Kubernetes' controllers, `pod.py`,
`container.py` and `process.py` the kubelet, `proxy.py` the Service.
Must never know: how a service is planned. What a cluster would do with a new manifest: `controllers.py`, or nothing.
"""
