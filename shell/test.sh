#!/bin/sh
# Runs the tests; the first time it sets everything up.
#
#     sh shell/test.sh [flags of pytest]
#
# Works from any folder: paths among the flags are relative to the project. VENV and PYTHON: see setup.sh.
set -eu

python=$(sh "$(dirname -- "$0")/setup.sh")
CDPATH='' cd -- "$(dirname -- "$0")/.."
exec "$python" -m pytest "$@"
