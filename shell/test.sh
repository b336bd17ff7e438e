#!/bin/sh
# Runs the tests; the first time it sets everything up.
#
#     sh shell/test.sh [--all] [flags of pytest]
#
# Without --all: those that find nearly every mistake, in 7 to 15 minutes on two cores. With --all: all, in 25 to 50.
#
# Works from any folder: paths among the flags are relative to the project. VENV and PYTHON: see setup.sh.
set -eu

python=$(sh "$(dirname -- "$0")/setup.sh")
CDPATH='' cd -- "$(dirname -- "$0")/.."
exec "$python" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
