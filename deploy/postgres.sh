#!/bin/sh
# Starts PostgreSQL for MLflow's store; the first start creates the cluster and the database.
set -eu
data=/postgres/data
if [ ! -e "$data" ]; then
  # Created under another name and renamed when complete, so an interrupted first start is simply repeated.
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
