#!/usr/bin/env bash
# All that the project wants to know of a GPU machine, in one call of under 8 minutes; it needs no network.
#
#   bash bench/gpu.sh OUT                    results as JSON, and logs, in the folder OUT
#   bash bench/gpu.sh OUT --sanitize         instead: torch's sanitizer of streams, and compute-sanitizer, over the tests
#   PYTHON=/path/to/python bash bench/gpu.sh OUT
#
# One GPU is one rank, which needs no collectives: `nccl` makes them all the same, over NCCL. Tests of several ranks
# (tests/gpu) are skipped where there are fewer GPUs.
# bench/gpu_model.py predicts from machine code, without a GPU, what `kernels` measures here; compare the two.
#
# PYTHON (default: .venv/bin/python where there is one, else python3) must have torch, triton, numpy, rich and tqdm,
# and pytest and hypothesis for the tests, which run 8 at a time where there is pytest-xdist. Nothing is installed.
# What fails does not keep the rest from running; the exit status tells.
set -uo pipefail

case "${1:-}" in
    "" | -h | --help)
        awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
        exit $(($# == 0 ? 2 : 0))
        ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
what=${2:-}
case "$what" in
    "" | --sanitize) ;;
    *) echo "gpu.sh: no such option: $what" >&2; exit 2 ;;
esac
python=${PYTHON:-$root/.venv/bin/python}
if ! [[ -x $(command -v "$python") ]]; then python=python3; fi
export PYTHONPATH=$root PYTHONUNBUFFERED=1
cd "$root" || exit 1

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: $python finds no GPU" >&2
    exit 2
fi

failed=0
# run NAME SECONDS COMMAND...: the limits add up to less than 8 minutes.
run() {
    local name=$1 limit=$2
    shift 2
    printf '== %s\n' "$name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
    local status=${PIPESTATUS[0]}
    if ((status)); then
        printf '== %s failed with status %s (124: after %s s)\n' "$name" "$status" "$limit"
        failed=1
    fi
}

if [[ $what == --sanitize ]]; then
    tests=(-m pytest -q -x -m gpu tests/kernels/test_gpu.py)
    run sanitizer-of-streams 150 env TORCH_CUDA_SANITIZER=1 "$python" "${tests[@]}" -k "stages or elsewhere or released"
    run memcheck 150 compute-sanitizer --tool memcheck --error-exitcode 1 "$python" "${tests[@]}" -k test_one_shard
    run initcheck 150 compute-sanitizer --tool initcheck --error-exitcode 1 "$python" "${tests[@]}" -k test_one_shard
    exit $failed
fi

# The compilation of a test's kernels needs a core, and no GPU.
several=(-p no:benchmark)  # which warns of -n, and a warning is an error
if "$python" -c 'import xdist' 2> /dev/null; then several+=(-n 8); fi
gpt=(--layers 12 --width 1024 --heads 16 --vocab 32768 --batch 4 --context 512)
run tests 90 "$python" -m pytest -q -m gpu "${several[@]}" tests/kernels/test_gpu.py
run nccl 40 "$python" -m pytest -q -m gpu "${several[@]}" tests/gpu/test_nccl_one_rank.py
run kernels 60 "$python" bench/kernels.py --device cuda --pairs 7 --out "$out"
# One rank moves nothing, so stage 2 takes the steps of stage 1.
engines=(--rounds 7 --burst 3 --engines ddp shardopt-1 module-1 module-2-cpu module-3 fsdp2)
run train-fp32 95 "$python" bench/train.py --device cuda --dtype fp32 "${engines[@]}" "${gpt[@]}" --out "$out"
run train-bf16 95 "$python" bench/train.py --device cuda --dtype bf16 "${engines[@]}" "${gpt[@]}" --out "$out"
run formats 25 "$python" bench/formats.py --device cuda --out "$out"
run moves 15 "$python" bench/offload.py --device cuda --only moves --elements 64 --rounds 5 --out "$out"
run bus 15 "$python" bench/bus.py --elements 64 --rounds 5 --out "$out"
run cold-start 40 "$python" bench/cold_start.py --device cuda --samples 2 --out "$out"
exit $failed
