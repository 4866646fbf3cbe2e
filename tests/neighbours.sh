#!/usr/bin/env bash
# Test the package with the libraries beside it, installed and not imitated, and renew the table of what each family can do
# with them. Makes a virtual environment (VENV, default .venv). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh test,neighbours
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CAPABILITIES=$(mktemp)
"$python" -m pytest -n "${WORKERS:-2}" -m "neighbours or capability" "$@"
"$python" tests/capabilities.py "$CAPABILITIES"
"$python" model_cards/figures.py
