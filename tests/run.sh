#!/usr/bin/env bash
# Check and test the package. Makes a virtual environment (VENV, default .venv) and installs what it needs.
# Further arguments go to pytest: bash tests/run.sh -k centering
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh test,lint
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n "${WORKERS:-2}" "$@"
