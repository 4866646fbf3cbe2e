#!/usr/bin/env bash
# Train GPT-2, a Pre-LN Transformer and SAS-P on the Python standard library and say which one wins (about five minutes
# on two cores). It creates a virtual environment (VENV, default .venv) and installs what it needs. Further arguments go to
# examples/experiments/compare_blocks.py: bash examples/run.sh --models pre_ln sas --learning_rates 2e-3 4e-3 8e-3
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh train
exec "$python" examples/experiments/compare_blocks.py "$@"
