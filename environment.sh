# Sourced by examples/run.sh and tests/run.sh: makes a virtual environment (VENV, default .venv), installs torch and the
# package with the extras named, and sets `python`.
# threads that wait sleep: while another program takes a core, spinning ones make attention several times slower
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
VENV=${VENV:-.venv}
# modules are compiled as they are imported, once: most never are. Where this is set, every process compiles anew all that
# it imports: for torch and transformers ten seconds
unset PYTHONDONTWRITEBYTECODE
[ -d "$VENV" ] || python3 -m venv "$VENV"
python=$VENV/bin/python
"$python" -c "import torch" 2>/dev/null || "$python" -m pip install -q --no-compile torch==2.13.0
"$python" -m pip install -q --no-compile -e ".[$1]"
