#!/bin/sh
# Starts MLflow's server; all its files are writable for any uid, as the next server may run as another.
set -eu
for path in /mlflow/mlflow.db /mlflow/artifacts; do
  if [ -e "$path" ] && [ ! -w "$path" ]; then
    echo "$path belongs to uid $(stat -c %u "$path"), and uid $(id -u) cannot write it; start as that uid, or change the owner:" \
      "docker compose run --rm --no-deps --user 0 --cap-add CHOWN mlflow chown -R $(id -u) /mlflow" >&2
    exit 4
  fi
done
umask 000
# Created here, because SQLite would create it writable for its owner only.
[ -e /mlflow/mlflow.db ] || : >/mlflow/mlflow.db
exec mlflow server "$@"
