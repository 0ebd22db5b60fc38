#!/usr/bin/env bash
# Check the form of the code: lint, format, types, ASCII. Changes nothing.
#
#   bash scripts/check.sh          check
#   bash scripts/check.sh --fix    first mend what ruff can mend by itself
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
    "" | --fix) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac
set_up
cd "$root"

if [[ ${1:-} == --fix ]]; then
    "$python" -m ruff check --fix .
    "$python" -m ruff format .
fi

failed=0
check() {
    printf '== %s\n' "$1"
    shift
    "$@" || failed=1
}

only_ascii() {
    if LC_ALL=C git grep --untracked -nI '[^[:print:][:space:]]'; then
        echo "these lines hold characters outside ASCII"
        return 1
    fi
}

# All of them run, so that one call tells all there is to mend.
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy, of the package and of the pages' blocks" "$python" scripts/snippets.py
check "ASCII only" only_ascii
exit $failed
