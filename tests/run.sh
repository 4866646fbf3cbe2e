#!/usr/bin/env bash
# Check and test the package. This script creates a virtual environment (VENV, default .venv) and installs what it needs.
# Further arguments go to pytest: bash tests/run.sh -k centering. With -m thorough, the slow tests run that try every case.
# WORKERS (default 3) processes run tests. Three keep two cores busy, because tests wait for processes that they start.
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh test,lint
# a browser, without which the tests of the page of `explore` are skipped
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    timeout 240 sh -c "apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium" >/dev/null ||
        echo "No Chromium can be installed: the tests of explore's page are skipped."
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n "${WORKERS:-3}" --dist worksteal "$@"
