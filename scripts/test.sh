#!/usr/bin/env bash
# Run the tests with pytest.
#
#   bash scripts/test.sh                  the default run
#   bash scripts/test.sh --slow           the long sweeps too: several times as long
#   bash scripts/test.sh --gpu            only the tests that need a GPU
#   bash scripts/test.sh -x -k layout     any other argument goes to pytest, which then runs in one process
#
# Whole runs take one file more at a time than there are cores. Tests that need a GPU are part of every run where there
# is one. Environment: WORKERS, the number of files at a time.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

slow=false gpu_only=false arguments=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --slow) slow=true ;;
        --gpu) gpu_only=true ;;
        *) arguments+=("$argument") ;;
    esac
done
set_up

# The frameworks that tests run with. Nothing else needs them, so .venv is made without.
has_frameworks() {
    "$python" - "$root/constraints.txt" <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version

pins = dict(line.strip().split("==") for line in open(sys.argv[1]) if "==" in line and not line.startswith("#"))
try:
    names = ("transformers", "accelerate", "lightning", "peft", "bitsandbytes", "torchao")
    sys.exit(any(version(name) != pins[name] for name in names))
except PackageNotFoundError:
    sys.exit(1)
EOF
}
cd "$root"
# Else each of a run's processes would rewrite the assertions of all tests, and compile the package, anew.
unset PYTHONDONTWRITEBYTECODE
if ! has_frameworks; then
    "$python" -m pip install --quiet -c constraints.txt -e ".[frameworks]"
fi

terms=()
if ! $slow; then terms+=("not slow"); fi
if $gpu_only; then
    terms+=("gpu")
elif ! has_nvidia_gpu; then
    terms+=("not gpu")
fi
selection=""
for mark in ${terms[@]+"${terms[@]}"}; do selection+="${selection:+ and }$mark"; done

# Each of the ranks that a test starts computes on one thread, and mostly waits for the others. With one file more than
# cores, a core has work while the tests of the other files wait.
workers=()
if ((${#arguments[@]} == 0)) && ! $gpu_only; then
    cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    workers=(--numprocesses "${WORKERS:-$((cores < 8 ? cores + 1 : 8))}" --dist loadfile --no-loadscope-reorder)
fi
exec "$python" -m pytest -m "$selection" ${workers[@]+"${workers[@]}"} ${arguments[@]+"${arguments[@]}"}
