#!/usr/bin/env bash
# Run a benchmark: a script of bench/.
#
#   bash scripts/bench.sh                     all whose numbers stand in the README (an hour or more)
#   bash scripts/bench.sh NAME [ARGUMENT...]  bench/NAME.py with its own arguments (NAME --help tells them)
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

list_benches() {
    local path
    printf '\nBenchmarks:\n'
    for path in "$root"/bench/*.py; do
        # What only helps the others has no main block.
        if grep -qs '^if __name__ == "__main__":' "$path"; then
            printf '  %-14s %s\n' "$(basename "$path" .py)" "$(sed -n '1s/^"""\(.*[^"]\)\("""\)\{0,1\}$/\1/p' "$path")"
        fi
    done
}

case "${1:-}" in
    -h | --help) usage; list_benches; exit 0 ;;
    "") ;;
    *)
        if [[ ! -f $root/bench/$1.py ]]; then
            { printf 'bench: there is no bench/%s.py\n\n' "$1"; usage; list_benches; } >&2
            exit 2
        fi
        ;;
esac
set_up

if (($# == 0)); then
    "$python" "$root/bench/kernels.py"
    "$python" "$root/bench/train.py"
    "$python" "$root/bench/train.py" --dtype bf16
    "$python" "$root/bench/train.py" --ranks 4 --engines ddp fsdp2 module-2 module-3
    "$python" "$root/bench/offload.py"
    "$python" "$root/bench/checkpoint.py"
    "$python" "$root/bench/hooks.py"
    "$python" "$root/bench/plan.py"
    "$python" "$root/bench/cold_start.py"
else
    name=$1
    shift
    "$python" "$root/bench/$name.py" "$@"
fi
