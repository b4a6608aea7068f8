#!/bin/sh
# MLflow's server on files that any uid may write: the next one to start it may be another's.
set -eu
for path in /mlflow/mlflow.db /mlflow/artifacts; do
  if [ -e "$path" ] && [ ! -w "$path" ]; then
    echo "$path belongs to uid $(stat -c %u "$path"), and uid $(id -u) may not write it; start as that uid, or give it away:" \
      "docker compose run --rm --no-deps --user 0 --cap-add CHOWN mlflow chown -R $(id -u) /mlflow" >&2
    exit 4
  fi
done
umask 000
# SQLite would make it for its owner alone.
[ -e /mlflow/mlflow.db ] || : >/mlflow/mlflow.db
exec mlflow server "$@"
