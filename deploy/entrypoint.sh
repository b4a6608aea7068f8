#!/bin/sh
# A container's first process: a command of the pipeline by its name, or any other program.
set -eu
case "${1:---help}" in
  --help | prepare | train | evaluate | sync | lead | join | doctor) exec python -m pipeline "$@" ;;
  *) exec "$@" ;;
esac
