from e2e.scenarios import stoker
import time
def test_try(place, hub):
    t=time.time()
    place.apply(stoker.service("smollm2"))
    stoker.wait_ready(place, "smollm2", 200)
    print("ready in", time.time()-t)
    print(place.kubectl("get","infsvc"), place.kubectl("get","pods,pvc,job,svc"), place.kubectl("describe","infsvc","smollm2"), place.kubectl("get","events"))
    print(stoker.ask(stoker.url(place,"smollm2"),"smollm2"))
