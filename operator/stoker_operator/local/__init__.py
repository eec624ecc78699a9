"""`stoker up`: the same reconciler against a store on this machine whose controllers start processes."""
