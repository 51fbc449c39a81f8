# Two images: `operator` (no JAX) and `trainer`. Both run as 65532 with a read-only root filesystem.
#   docker build --target operator -t ling-operator .
#   docker build --target trainer  -t ling-trainer .          (TPU)
#   docker build --target trainer --build-arg EXTRA= -t ling-trainer:cpu .
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/ requirements/
COPY pyproject.toml README.md LICENSE ./
COPY operator/ operator/
COPY trainer/ trainer/

FROM build AS build-operator
RUN python3 -m venv /opt/ling \
 && /opt/ling/bin/pip install --no-cache-dir --require-hashes -r requirements/operator.txt \
 && /opt/ling/bin/pip install --no-cache-dir --no-deps .

FROM build AS build-trainer
ARG EXTRA=tpu
RUN python3 -m venv /opt/ling \
 && /opt/ling/bin/pip install --no-cache-dir --require-hashes -r "requirements/trainer${EXTRA:+-$EXTRA}.txt" \
 && /opt/ling/bin/pip install --no-cache-dir --no-deps .

FROM ${BASE} AS runtime
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 ca-certificates \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/ling/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp

FROM runtime AS operator
COPY --from=build-operator /opt/ling /opt/ling
ENTRYPOINT ["ling-operator"]

FROM runtime AS trainer
COPY --from=build-trainer /opt/ling /opt/ling
ENTRYPOINT ["python3", "-m", "ling_trainer"]
