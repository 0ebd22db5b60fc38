#!/usr/bin/env bash
# Build the site of docs/ into site/, with warnings as errors. It needs no torch: docstrings are read, not imported.
#
#   bash scripts/docs.sh            build; site/index.html is its first page
#   bash scripts/docs.sh --serve    build again at each change, and serve it at http://127.0.0.1:8000
#
# Its packages lie in .venv-docs, which this makes. Environment: PYTHON, the interpreter to make it with.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
    "" | --serve) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

venv=$root/.venv-docs
wanted=$(cat "$root/constraints-docs.txt")
cd "$root"
if [[ ! -f $venv/.complete || $(<"$venv/.complete") != "$wanted" ]]; then
    base=${PYTHON:-python3}
    if [[ -x $python ]]; then base=$python; fi
    "$base" -m venv --clear "$venv"
    mapfile -t packages < <("$venv/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")')
    "$venv/bin/python" -m pip install --quiet -c constraints-docs.txt "${packages[@]}"
    printf '%s' "$wanted" >"$venv/.complete"
fi
if [[ ${1:-} == --serve ]]; then
    exec "$venv/bin/python" -m mkdocs serve --strict
fi
exec "$venv/bin/python" -m mkdocs build --strict --clean
