# The operator: kopf and a Kubernetes client, no torch.
#   docker build -f images/operator.Dockerfile -t stoker/operator:0.1.0 .
# Runs as user 65532 with a read-only root; writes nowhere.
ARG PYTHON=3.12.11-slim-bookworm

FROM docker.io/library/python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/stoker
WORKDIR /src
# The dependencies first: a change of the sources alone does not install them again.
COPY images/operator.lock images/
RUN pip --python /opt/stoker/bin/python install --require-virtualenv -r images/operator.lock
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY operator operator
COPY runtime runtime
COPY kernels kernels
# The wheel holds all four packages; this image keeps the two that the operator imports.
RUN pip --python /opt/stoker/bin/python install --no-deps . \
 && rm -r /opt/stoker/lib/python*/site-packages/stoker_runtime /opt/stoker/lib/python*/site-packages/stoker_kernels \
 && /opt/stoker/bin/python -m compileall -q -j 0 /opt/stoker/lib

FROM docker.io/library/python:${PYTHON}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stoker-operator" \
      org.opencontainers.image.description="Turns InferenceService objects into running, verified model servers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Nothing installs packages in a running operator.
RUN rm -rf /usr/local/lib/python*/site-packages/* /usr/local/lib/python*/ensurepip /usr/local/bin/pip*
COPY --from=build /opt/stoker /opt/stoker
ENV PATH=/opt/stoker/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["stoker"]
CMD ["operator"]
