# The operator: kopf and a Kubernetes client, no torch.
#   docker build -f images/operator.Dockerfile -t stoker/operator:0.1.0 .
# Runs as user 65532 with a read-only root; writes nowhere.
# Behind a mirror, pip's configuration comes as a secret: --secret id=pip.conf,src=pip.conf --secret id=ca.crt,src=ca.crt
ARG PYTHON=3.12.11-slim-bookworm

FROM docker.io/library/python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONFIG_FILE=/run/secrets/pip.conf
RUN python -m venv --without-pip /opt/stoker
WORKDIR /src
# The dependencies first: a change of the sources alone does not install them again.
COPY images/operator.lock images/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    pip --python /opt/stoker/bin/python install --require-virtualenv --no-compile -r images/operator.lock
# 80 MB of generated models, of which the operator imports a handful: Python imports them, compiled, from a sixth of that.
RUN cd /opt/stoker/lib/python*/site-packages \
 && /opt/stoker/bin/python -m compileall -q -b -j 0 --invalidation-mode unchecked-hash kubernetes \
 && find kubernetes -name '*.py' -delete && find kubernetes -depth -type d -name test -exec rm -r {} + \
 && /opt/stoker/bin/python -m zipfile -c kubernetes.zip kubernetes \
 && rm -r kubernetes && echo kubernetes.zip > kubernetes.pth
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY operator operator
COPY crds/presets crds/presets
COPY runtime runtime
COPY kernels kernels
# The wheel holds all four packages; this image keeps the two that the operator imports.
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    pip --python /opt/stoker/bin/python install --no-compile --no-deps . \
 && rm -r /opt/stoker/lib/python*/site-packages/stoker_runtime /opt/stoker/lib/python*/site-packages/stoker_kernels \
 && /opt/stoker/bin/python -m compileall -q -j 0 /opt/stoker/lib

# The base without what installs packages, builds, documents or translates. A file that a layer deletes is still in the
# layers below it, so what is left is copied into an image of its own.
FROM docker.io/library/python:${PYTHON} AS base
RUN rm -rf /usr/local/lib/python*/site-packages/* /usr/lib/python3/dist-packages/* /usr/local/bin/pip* /usr/bin/pip* \
        /usr/local/include /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale /usr/share/python-wheels \
        /var/cache/* /var/lib/apt/lists/* /var/log/* /root/.cache \
 && for part in ensurepip idlelib lib2to3 pydoc_data test tkinter turtledemo; do \
        rm -rf /usr/local/lib/python3.*/$part /usr/lib/python3.*/$part; \
    done

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stoker-operator" \
      org.opencontainers.image.description="Turns InferenceService objects into running, verified model servers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=base / /
COPY --from=build /opt/stoker /opt/stoker
ENV PATH=/opt/stoker/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["stoker"]
CMD ["operator"]
