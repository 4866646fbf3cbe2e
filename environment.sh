# Sourced by examples/run.sh and tests/run.sh: creates a virtual environment (VENV, default .venv), installs torch and the
# package with the given extras, and sets `python`.
# Threads sleep while they wait. If they spun, attention would be several times slower while other programs run.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
VENV=${VENV:-.venv}
# --no-compile below leaves the compilation of modules to their first import. If this variable were set, each process would
# compile again what it imports, which takes ten seconds for torch and transformers.
unset PYTHONDONTWRITEBYTECODE
[ -d "$VENV" ] || python3 -m venv "$VENV"
python=$VENV/bin/python
"$python" -c "import torch" 2>/dev/null || "$python" -m pip install -q --no-compile torch==2.13.0
"$python" -m pip install -q --no-compile -e ".[$1]"
