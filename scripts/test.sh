#!/usr/bin/env bash
# Run the tests with pytest.
#
#   bash scripts/test.sh                  the default run: under 15 minutes on two cores
#   bash scripts/test.sh --slow           the long sweeps too
#   bash scripts/test.sh --gpu            only the tests that need a GPU
#   bash scripts/test.sh -x -k layout     any other argument goes to pytest
#
# Tests that need a GPU are part of every run where there is one.
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

terms=()
if ! $slow; then terms+=("not slow"); fi
if $gpu_only; then
    terms+=("gpu")
elif ! has_nvidia_gpu; then
    terms+=("not gpu")
fi
selection=""
for mark in ${terms[@]+"${terms[@]}"}; do selection+="${selection:+ and }$mark"; done
cd "$root"
exec "$python" -m pytest -m "$selection" ${arguments[@]+"${arguments[@]}"}
