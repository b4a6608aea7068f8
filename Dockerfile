# The environment of every container, and the code for those that mount none. A digest pins the base: --build-arg BASE=debian:bookworm-slim@sha256:…
# hadolint global ignore=DL3008
# Debian's archive keeps only the newest version of a package: a pinned one would soon not build.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS system
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates dataset-fashion-mnist git python3 \
    && rm -rf /var/lib/apt/lists/* \
    # A mounted checkout may belong to another uid, and whoever commits in a container needs a name.
    && git config --system safe.directory '*' \
    && git config --system user.name lockstep \
    && git config --system user.email lockstep@localhost

FROM system AS pip
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv --without-pip /opt/venv

# Torch and the CUDA it brings apart from the rest: a change of either leaves the other's layer as it is.
FROM system AS locks
COPY requirements.lock /
RUN awk '/^[a-z]/ { file = /^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ ? "/torch.lock" : "/rest.lock" } file { print > file }' /requirements.lock

FROM pip AS torch
COPY --from=locks /torch.lock /
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip --python /opt/venv/bin/python install --no-deps --require-hashes --requirement /torch.lock

FROM pip AS rest
COPY --from=locks /rest.lock /
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip --python /opt/venv/bin/python install --no-deps --require-hashes --requirement /rest.lock

# A server for MLflow's store; docker-compose.postgres.yml starts it.
FROM ${BASE} AS postgres
RUN apt-get update \
    && apt-get install -y --no-install-recommends postgresql-15 \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o postgres -m 700 /postgres
COPY deploy/postgres.sh /usr/local/bin/
ENV PATH=/usr/lib/postgresql/15/bin:$PATH
# Its files lie in a volume, and it starts only as a user with a name.
# hadolint ignore=DL3066
USER postgres
# Without waiting for its clients to go.
STOPSIGNAL SIGINT
ENTRYPOINT ["postgres.sh"]

FROM system AS lockstep
# The server keeps its files in a volume, which takes this folder's mode: any uid may write. In a sticky folder none may open another's.
RUN install -d -m 777 /mlflow
COPY --from=torch /opt/venv /opt/venv
COPY --from=rest /opt/venv /opt/venv
COPY deploy/entrypoint.sh deploy/mlflow-server.sh /usr/local/bin/
WORKDIR /lockstep
COPY requirements.lock dvc.yaml params.yaml ./
COPY pipeline pipeline
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# What this image is made of, in one digest: receipts carry it where nobody passes Docker's own id.
RUN mkdir /etc/lockstep \
    && { dpkg-query --show; find . /opt/venv/lib/python3.11/site-packages -path '*/RECORD' -o -path './*' -type f | LC_ALL=C sort | xargs -d '\n' sha256sum; } \
    | sha256sum | sed 's/ .*//; s/^/content:/' > /etc/lockstep/image
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/lockstep \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    # Any uid, with a name or without, and a read-only root: what is written goes to /tmp.
    HOME=/tmp \
    USER=lockstep \
    DVC_SITE_CACHE_DIR=/tmp/dvc
ARG REVISION=
ENV LOCKSTEP_COMMIT=$REVISION
LABEL org.opencontainers.image.title=lockstep \
      org.opencontainers.image.revision=$REVISION
USER 1000:1000
ENTRYPOINT ["entrypoint.sh"]
CMD ["--help"]
