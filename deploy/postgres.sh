#!/bin/sh
# PostgreSQL for MLflow's store: the first start makes the cluster and the database, every start serves it.
set -eu
data=/postgres/data
if [ ! -e "$data" ]; then
  # Under another name until all of it is there: a start that is interrupted leaves nothing that a next one would trust.
  umask 077
  rm -rf "$data.new" /tmp/password
  printf '%s' "$POSTGRES_PASSWORD" >/tmp/password
  initdb --pgdata="$data.new" --username=mlflow --pwfile=/tmp/password --auth=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8
  rm /tmp/password
  echo 'CREATE DATABASE mlflow' | postgres --single -D "$data.new" postgres
  echo 'host all all all scram-sha-256' >>"$data.new/pg_hba.conf"
  sync
  mv "$data.new" "$data"
fi
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=
