# Two images: `operator` (no JAX) and `trainer`. `make images` builds both.
#   docker build --target operator -t ling-operator .
#   docker build --target trainer  -t ling-trainer .                            (TPU)
#   docker build --target trainer  --build-arg EXTRA= -t ling-trainer:cpu .
#
# Both run as 65532 on a read-only root filesystem. What they hold is in /opt/ling/sbom.cdx.json.
# Packages come from the hashed locks in requirements/. A registry mirror is a matter of whoever
# builds: mount its pip.conf (`buildah build -v`, `podman build -v`) or use a BASE that has one.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS python
# Debian's release, which BASE names, decides the versions; a pin would break with each of its fixes.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3 ca-certificates \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
 && groupadd --gid 65532 ling \
 && useradd --uid 65532 --gid 65532 --key UID_MAX=65532 \
      --home-dir /tmp --no-create-home --shell /usr/sbin/nologin ling

FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_CACHE_DIR=/var/cache/pip
WORKDIR /src
COPY requirements/image.txt requirements/
RUN --mount=type=cache,target=/var/cache/pip \
    python3 -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes -r requirements/image.txt

# Our own code apart from its dependencies: a changed line is a small layer to pull, not a new GB.
FROM build AS project
COPY pyproject.toml README.md LICENSE ./
COPY operator/ operator/
COPY trainer/ trainer/
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && python3 -m venv --without-pip /opt/ling \
 && /opt/build/bin/pip --python /opt/ling/bin/python install \
      --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM build AS operator-packages
COPY requirements/operator.txt requirements/
# Of the Kubernetes client the operator uses the credentials; its HTTP is aiohttp's. The client's
# asynchronous copy of itself is 40 MB that nothing imports, its 900 classes need no bytecode.
RUN --mount=type=cache,target=/var/cache/pip \
    python3 -m venv --without-pip /opt/ling \
 && /opt/build/bin/pip --python /opt/ling/bin/python install --no-compile \
      --require-hashes -r requirements/operator.txt \
 && rm -r /opt/ling/lib/python3*/site-packages/kubernetes/aio \
 && /opt/ling/bin/python -m compileall -q -x 'kubernetes/client/(api|models)/' /opt/ling/lib

FROM build AS trainer-packages
ARG EXTRA=tpu
COPY requirements/trainer.txt requirements/trainer-tpu.txt requirements/
RUN --mount=type=cache,target=/var/cache/pip \
    python3 -m venv --without-pip /opt/ling \
 && /opt/build/bin/pip --python /opt/ling/bin/python install \
      --require-hashes -r "requirements/trainer${EXTRA:+-$EXTRA}.txt"

FROM operator-packages AS operator-sbom
COPY pyproject.toml ./
COPY --from=project /opt/ling /opt/ling
RUN /opt/build/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
      --output-file /opt/ling/sbom.cdx.json /opt/ling/bin/python

FROM trainer-packages AS trainer-sbom
COPY pyproject.toml ./
COPY --from=project /opt/ling /opt/ling
RUN /opt/build/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
      --output-file /opt/ling/sbom.cdx.json /opt/ling/bin/python

FROM python AS runtime
ARG BASE
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}"
# HOME is of use where /tmp is a volume, and of no harm where it is read-only.
ENV PATH=/opt/ling/bin:$PATH HOME=/tmp \
    PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp

# Version and revision come last: they change oftener than the packages.
FROM runtime AS operator
COPY --from=operator-packages /opt/ling /opt/ling
COPY --from=project /opt/ling /opt/ling
COPY --from=operator-sbom /opt/ling/sbom.cdx.json /opt/ling/
ENTRYPOINT ["ling-operator"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ling-operator" \
      org.opencontainers.image.description="Submits training runs as JobSets, halts those that diverge." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS trainer
COPY --from=trainer-packages /opt/ling /opt/ling
COPY --from=project /opt/ling /opt/ling
COPY --from=trainer-sbom /opt/ling/sbom.cdx.json /opt/ling/
ENTRYPOINT ["python3", "-m", "ling_trainer"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ling-trainer" \
      org.opencontainers.image.description="Pre-trains Ling2 with JAX." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
