# The engine, its API server and `stoker fetch`: torch and the kernels, no kopf and no compiler.
#   docker build -f images/runtime.Dockerfile -t stoker/runtime:0.1.0 .
# Runs as user 65532 with a read-only root; /tmp is the one place it writes to (an emptyDir in the manifests).
# Behind a mirror, pip's configuration comes as a secret: --secret id=pip.conf,src=pip.conf --secret id=ca.crt,src=ca.crt
ARG PYTHON=3.12.11-slim-bookworm

FROM docker.io/library/python:${PYTHON} AS environment
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONFIG_FILE=/run/secrets/pip.conf
RUN python -m venv --without-pip /opt/stoker
WORKDIR /src

FROM environment AS sources
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY operator operator
COPY crds/presets crds/presets
COPY runtime runtime
COPY kernels kernels
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    pip --python /opt/stoker/bin/python install --no-deps . \
 && rm -r /opt/stoker/lib/python*/site-packages/stoker_operator \
 && /opt/stoker/bin/python -m compileall -q -j 0 /opt/stoker/lib

# Gigabytes: a change of the sources does not install them again.
FROM environment AS dependencies
COPY images/runtime.lock images/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    pip --python /opt/stoker/bin/python install --require-virtualenv -r images/runtime.lock

# Every kernel for every supported GPU, with no GPU present: a start compiles nothing. Compilers stay in this stage.
FROM dependencies AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    pip --python /opt/stoker/bin/python install "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" \
        "nvidia-cuda-crt==13.0.*" "nvidia-cuda-cccl==13.0.*"
COPY kernels /src/kernels
RUN cd kernels \
 && /opt/stoker/bin/python -m stoker_kernels.launch.nvcc --out /aot \
 && /opt/stoker/bin/python -m stoker_kernels.launch.cc --out /aot \
 && /opt/stoker/bin/python -m stoker_kernels.launch.aot --out /aot

FROM docker.io/library/python:${PYTHON} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stoker-runtime" \
      org.opencontainers.image.description="Stoker's inference engine with an OpenAI-compatible API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN rm -rf /usr/local/lib/python*/site-packages/* /usr/local/lib/python*/ensurepip /usr/local/bin/pip*
ENV PATH=/opt/stoker/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /
EXPOSE 8000
ENTRYPOINT ["stoker"]
CMD ["serve", "--help"]

# For tests on a CPU (--target without-dependencies): the sources alone. What they need is lent by the node that runs
# them, as a folder of packages for the same Python.
FROM base AS without-dependencies
ARG PACKAGES=/opt/packages
COPY --from=sources /opt/stoker /opt/stoker
USER 0
RUN for place in /opt/stoker/lib/python*/site-packages; do echo "${PACKAGES}" > "$place/lent.pth"; done
USER 65532:65532

FROM base
ENV STOKER_AOT_DIR=/opt/stoker/aot
COPY --from=dependencies /opt/stoker /opt/stoker
COPY --from=sources /opt/stoker /opt/stoker
COPY --from=kernels /aot /opt/stoker/aot
