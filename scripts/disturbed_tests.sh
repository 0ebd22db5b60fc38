#!/usr/bin/env bash
# Run the default tests where nothing is as they like it: beside busy processes, then in orders drawn at random.
#
#   bash scripts/disturbed_tests.sh [--load TIMES] [--random TIMES]     default: 5 times each
#
# A line for each run, which is added to tests/results/disturbed.md too, and its output in a file when it failed.
# Environment: BUSY, the number of busy processes (4).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

load=5 random=5
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --load) load=$2; shift 2 ;;
        --random) random=$2; shift 2 ;;
        *) usage >&2; exit 2 ;;
    esac
done

outputs=$(mktemp -d)
results=$root/tests/results/disturbed.md
commit=$(git -C "$root" rev-parse --short HEAD)
busy=()
stop() { if ((${#busy[@]})); then kill "${busy[@]}" 2>/dev/null || true; fi; busy=(); }
trap stop EXIT

# A run's name and pytest's last line; then, for people, where its output is.
note() {
    local counts=${2//=/}
    printf '| %s | %s | %s |%s |\n' "$(date +%F)" "$commit" "$1" "${counts% }" >>"$results"
    printf '%s:%s %s\n' "$1" "${counts% }" "${3:-}"
}

failed=0
run() {
    local name=$1 output
    output=$outputs/$(tr ' ' '-' <<<"$name").log
    shift
    if "$@" >"$output" 2>&1; then
        note "$name" "$(tail -n 1 "$output")"
        rm "$output"
    else
        note "$name" "$(tail -n 1 "$output")" "FAILED, see $output"
        failed=1
    fi
}

for ((number = 1; number <= load; number++)); do
    for ((each = 0; each < ${BUSY:-4}; each++)); do
        while :; do :; done &
        busy+=($!)
    done
    run "beside ${BUSY:-4} busy processes, run $number" bash "$root/scripts/test.sh"
    stop
done
for ((number = 1; number <= random; number++)); do
    seed=$((RANDOM * 32768 + RANDOM))
    # PYTEST_ADDOPTS leaves the run a whole one, of several files at a time.
    run "in the order of seed $seed" env PYTEST_ADDOPTS="-p randomly --randomly-seed=$seed" bash "$root/scripts/test.sh"
done
exit $failed
