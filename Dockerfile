# The image of every container, with the code for containers that mount no checkout.
# BASE may be any Debian whose Python the project allows (3.11 to 3.13); to pin it by digest: --build-arg BASE=debian:bookworm-slim@sha256:…
# hadolint global ignore=DL3008
# Debian's archive keeps only the newest version of a package, so a build with pinned versions would soon fail.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS system
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates dataset-fashion-mnist git python3 \
    && rm -rf /var/lib/apt/lists/* \
    # A mounted checkout may belong to another uid, and a commit made in a container needs an author.
    && git config --system safe.directory '*' \
    && git config --system user.name lockstep \
    && git config --system user.email lockstep@localhost

FROM system AS pip
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv --without-pip /opt/venv

# torch and its CUDA packages get a layer of their own, so a change of the other packages does not install them again.
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

# The PostgreSQL server of docker-compose.postgres.yml, in the base's own version.
FROM ${BASE} AS postgres
RUN apt-get update \
    && apt-get install -y --no-install-recommends postgresql \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /usr/lib/postgresql/*/bin /usr/lib/postgresql/bin \
    && install -d -o postgres -m 700 /postgres
COPY deploy/postgres.sh /usr/local/bin/
ENV PATH=/usr/lib/postgresql/bin:$PATH
# PostgreSQL refuses to start as a uid without a name, and its volume belongs to this user.
# hadolint ignore=DL3066
USER postgres
# A fast shutdown: PostgreSQL disconnects its clients instead of waiting for them.
STOPSIGNAL SIGINT
ENTRYPOINT ["postgres.sh"]

FROM system AS lockstep
# A new volume copies this folder's mode, so a server of any uid can write to it.
RUN install -d -m 777 /mlflow
COPY --from=torch /opt/venv /opt/venv
COPY --from=rest /opt/venv /opt/venv
COPY deploy/entrypoint.sh deploy/mlflow-server.sh /usr/local/bin/
WORKDIR /lockstep
COPY requirements.lock dvc.yaml params.yaml ./
COPY pipeline pipeline
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# One digest of all Debian packages, Python packages and code; receipts carry it when LOCKSTEP_IMAGE does not give Docker's id.
RUN mkdir /etc/lockstep \
    && { dpkg-query --show; find . /opt/venv/lib/python3*/site-packages -path '*/RECORD' -o -path './*' -type f | LC_ALL=C sort | xargs -d '\n' sha256sum; } \
    | sha256sum | sed 's/ .*//; s/^/content:/' > /etc/lockstep/image
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/lockstep \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    # The container may run as a uid without a name and with a read-only root: only /tmp is sure to be writable.
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
