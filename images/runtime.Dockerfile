# The engine, its API server and `stoker fetch`: torch and the kernels, no kopf and no compiler.
#   docker build -f images/runtime.Dockerfile -t stoker/runtime:0.1.0 .
# Runs as user 65532 with a read-only root; /tmp is the one place it writes to (an emptyDir in the manifests).
ARG PYTHON=3.12.11-slim-bookworm

FROM docker.io/library/python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/stoker
WORKDIR /src
# The dependencies first: they are gigabytes, and a change of the sources alone does not install them again.
COPY images/runtime.lock images/
RUN pip --python /opt/stoker/bin/python install --require-virtualenv -r images/runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY operator operator
COPY runtime runtime
COPY kernels kernels
RUN pip --python /opt/stoker/bin/python install --no-deps . \
 && rm -r /opt/stoker/lib/python*/site-packages/stoker_operator
# Every kernel for every supported GPU, with no GPU present: a start compiles nothing.
RUN /opt/stoker/bin/python -m stoker_kernels.aot
RUN /opt/stoker/bin/python -m compileall -q -j 0 /opt/stoker/lib

FROM docker.io/library/python:${PYTHON}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stoker-runtime" \
      org.opencontainers.image.description="Stoker's inference engine with an OpenAI-compatible API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN rm -rf /usr/local/lib/python*/site-packages/* /usr/local/lib/python*/ensurepip /usr/local/bin/pip*
COPY --from=build /opt/stoker /opt/stoker
ENV PATH=/opt/stoker/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /
EXPOSE 8000
ENTRYPOINT ["stoker"]
CMD ["serve", "--help"]
