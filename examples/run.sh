#!/usr/bin/env bash
# Train a standard and a simplified Transformer side by side on the Python standard library (about five minutes on two
# cores). Makes a virtual environment (VENV, default .venv) and installs what it needs. Further arguments go to
# examples/experiments/compare_blocks.py: bash examples/run.sh --blocks pre_ln sas sas_p
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh train
exec "$python" examples/experiments/compare_blocks.py "$@"
