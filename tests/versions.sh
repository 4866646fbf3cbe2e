#!/usr/bin/env bash
# Test what depends on versions of Python, torch and transformers with the oldest supported, with the newest that there
# are and with two combinations between them, and renew their table in model_cards/engine.md.
#     bash tests/versions.sh            all whose Python is installed: on PATH, or by pyenv
#     bash tests/versions.sh 3.10       those of this Python
# Makes a virtual environment for each in FOLDER (default .versions), of 5 GB, since PyPI's torch brings the libraries
# of CUDA; it runs on CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=$(realpath -m "${FOLDER:-.versions}")
export PYTHONPATH=. OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE
# Python, torch and transformers; the first is the oldest that pyproject.toml allows
oldest="3.10 2.11.0 5.16.1"
combinations=("$oldest" "3.11 2.13.0 5.19.0" "3.12 2.13.0 newest" "3.13 newest newest")
models=(tests/models/test_contract.py tests/models/test_seq2seq_contract.py)
# of every way from a model to a kernel one: bands, random blocks, global tokens, chunks, spans, shaped attention, trees
families="bigbird-causal or etc-bigbird or bp-causal or longformer-causal-global or reformer-causal or span-modern-"
families+=" or sas_p-alibi or seq2seq-led"
failed=0

# one that runs: pyenv has commands of Pythons that it does not run
interpreter() {
    local found
    for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*"/bin/python$1"; do
        ! "$found" -c "" 2>/dev/null || { echo "$found" && return; }
    done
    return 1
}

requirement() { [ "$2" = newest ] && echo "$1" || echo "$1==$2"; }

make_environment() {
    "$1" -m venv "$place"
    "$python" -m pip install -q --no-compile "$(requirement torch "$2")" "$(requirement transformers "$3")" \
        accelerate hypothesis pandas peft pyarrow pytest pytest-timeout pytest-xdist scikit-learn
}

test_part() {
    "$python" -m pytest -n "${WORKERS:-2}" -q -W default --junitxml "$place/results/$1.xml" "${@:2}" || failed=1
}

test_combination() {
    rm -rf "$place/results"
    test_part engine -k "not flex" tests/patterns tests/backends/test_contract.py tests/integration/test_cache.py \
        tests/integration/test_ways_to_sparse_models.py tests/integration/test_interface_masks.py \
        tests/integration/test_interface_generation.py
    test_part models -k "($families) and not compile and not export" "${models[@]}"
    test_part sharing tests/sharing
}

# the oldest torch traces least; it exports no model with grouped heads under sdpa for any length, transformers' own
# neither
test_compiler() {
    local exports=tests/models/test_contract.py::TestFamilyContract::test_exports_with_any_batch_and_length
    test_part compiled -k "compile or export or flex" --deselect "$exports[simplified-pre_ln-masked, with labels]" \
        --deselect "$exports[simplified-pre_ln-tokens alone]" tests/attention tests/integration tests/backends "${models[@]}"
}

for combination in "${combinations[@]}"; do
    read -r version torch transformers <<<"$combination"
    [ $# = 0 ] || [ "$1" = "$version" ] || continue
    if ! base=$(interpreter "$version"); then
        echo "Python $version is not installed: passed over."
        continue
    fi
    place=$FOLDER/${combination// /-} python=$FOLDER/${combination// /-}/bin/python
    [ -d "$place" ] || make_environment "$base" "$torch" "$transformers"
    echo "Python $version, torch $torch, transformers $transformers"
    test_combination
    [ "$combination" != "$oldest" ] || test_compiler
    "$python" tests/versions.py "$place/results"
done
exit "$failed"
