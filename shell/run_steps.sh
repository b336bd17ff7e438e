#!/bin/sh
# Runs the ladder of checks on both models; the first time it sets everything up.
#
#     sh shell/run_steps.sh [flags of steps/run_all.py]
#
# Works from any folder: paths among the flags are relative to where it is called. Exit status: 0 every rung
# passed, 1 something differs, 2 could not compare. VENV and PYTHON: see setup.sh.
set -eu

here=$(dirname -- "$0")
python=$(sh "$here/setup.sh")
exec "$python" "$here/../steps/run_all.py" "$@"
