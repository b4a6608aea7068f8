#!/bin/sh
# The container's entrypoint: runs a command of the pipeline given by name, or any other program.
set -eu
case "${1:---help}" in
  --help | prepare | train | evaluate | sync | verify | compare | sweep | watch | lead | join | doctor) exec python -m pipeline "$@" ;;
  *) exec "$@" ;;
esac
