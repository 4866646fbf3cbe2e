#!/usr/bin/env bash
# Check and test the package. Makes a virtual environment (VENV, default .venv) and installs what it needs.
# Further arguments go to pytest: bash tests/run.sh -k centering. What takes minutes and tries everything: -m thorough.
# WORKERS (default 3) run tests at a time: on two cores two of them would often wait for processes that they have started.
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh test,lint
# a browser for the page of `explore`, whose tests are skipped without one
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    timeout 240 sh -c "apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium" >/dev/null ||
        echo "No Chromium can be installed: the tests of explore's page are skipped."
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n "${WORKERS:-3}" --dist worksteal "$@"
