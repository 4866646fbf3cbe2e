#!/usr/bin/env bash
# Test the package with the libraries beside it, installed and not imitated, and run the tests that are too thorough for
# every day. Further arguments go to pytest. Makes a virtual environment (VENV, default .venv).
set -euo pipefail
cd "$(dirname "$0")/.."
source environment.sh test,neighbours
# one file of it is read; what it imports is pinned to versions that others here do not take
"$python" -m pip install -q --no-compile --no-deps FastNLP==1.0.1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# DeepSpeed compiles what its processes on CPUs talk through, by the ninja of this environment; a compilation that was
# killed would leave a lock, for which the next waits forever
PATH=$(realpath "$VENV")/bin:$PATH
TORCH_EXTENSIONS_DIR=$(mktemp -d)
export PATH TORCH_EXTENSIONS_DIR ULYSSES=--deepspeed
# once, and not while the processes of a test wait for each other
for builder in ShareMemCommBuilder CPUAdamBuilder; do
    "$python" -c "from deepspeed.accelerator import get_accelerator as found; found().create_op_builder('$builder').load()"
done
# the kernels of FlashAttention-4, compiled without a GPU, in an environment of their own
if [ "$(uname -s)" = Linux ]; then
    [ -d "$VENV-flash" ] || { python3 -m venv "$VENV-flash" && "$VENV-flash/bin/python" -m pip install -q torch==2.13.0; }
    "$VENV-flash/bin/python" -m pip install -q --no-compile --pre "flash-attn-4[cu13]" triton==3.6.0 transformers accelerate pytest
    PYTHONPATH=. "$VENV-flash/bin/python" tests/flash_compile.py --masks
    for arch in sm_80 sm_90 sm_100; do PYTHONPATH=. "$VENV-flash/bin/python" tests/flash_compile.py --arch "$arch"; done
fi
"$python" -m pytest -n "${WORKERS:-2}" -m "neighbours or thorough" "$@"
