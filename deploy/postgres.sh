#!/bin/sh
# PostgreSQL for MLflow's store: the first start makes the cluster and the database, every start serves it.
set -eu
data=/postgres/data
if [ ! -s "$data/PG_VERSION" ]; then
  umask 077
  rm -rf "$data"
  printf '%s' "$POSTGRES_PASSWORD" >/tmp/password
  initdb --pgdata="$data" --username=mlflow --pwfile=/tmp/password --auth=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8
  rm /tmp/password
  echo 'CREATE DATABASE mlflow' | postgres --single -D "$data" postgres
  echo 'host all all all scram-sha-256' >>"$data/pg_hba.conf"
fi
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=
