#!/usr/bin/env bash
# Make .venv: shardopt (editable) and all that its tests, benchmarks and plots need, pinned by constraints.txt.
#
#   bash scripts/setup.sh        the other scripts call it; when nothing has changed it returns at once
#
# Environment:
#   PYTHON         the interpreter to use (default: the first that fits of python3, python3.14 ... python3.11)
#   TORCH_INDEX    the package index that torch comes from, such as https://download.pytorch.org/whl/cu130
#                  (default: PyPI's build with CUDA where there is an NVIDIA GPU, a CPU build where there is none)
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
    "") ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

venv=$root/.venv
stamp=$venv/.complete # written last, so that an interrupted installation is taken up again

# The path belongs to it: the scripts in .venv name the place where it was made, and a checkout can be moved.
wanted="$root
$(cat "$root/pyproject.toml" "$root/constraints.txt")"
is_complete() { [[ -x $python && -f $stamp && $(<"$stamp") == "$wanted" ]]; }
if is_complete; then exit 0; fi

# Two scripts started at once must not install over one another.
if command -v flock >/dev/null; then
    exec 9<"$root/constraints.txt"
    flock 9
    if is_complete; then exit 0; fi
fi

# Bytecode of all modules of all packages is most of what an installation takes; Python makes it for those that a script
# imports, at the first import, unless it is told to write none.
bytecode=--no-compile
if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then bytecode=--compile; fi

say() { printf 'setup: %s\n' "$*" >&2; }

# Print the first interpreter that fits; when there is none, say what is missing and what to do.
find_python() {
    local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python) candidate found without_venv=""
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    # 3.14 is the last version that the pinned packages have wheels for.
    local probe='
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    sys.exit("another version")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("no venv")
'
    for candidate in "${candidates[@]}"; do
        if found=$("$candidate" -c "$probe" 2>&1); then
            command -v "$candidate"
            return
        elif [[ $found == "no venv" ]]; then
            without_venv=$candidate
        fi
    done
    if [[ -n $without_venv ]]; then
        say "$without_venv came without its venv and ensurepip modules, which make .venv."
        say "Install them (on Debian and Ubuntu: apt install python3-venv) and run this again."
    else
        say "no Python 3.11 to 3.14 found as ${candidates[*]}."
        say "Install one, or name one that is not on the PATH: PYTHON=/path/to/python3.12 bash scripts/setup.sh"
    fi
    return 1
}

# On Linux, PyPI's torch brings gigabytes of CUDA libraries, which are of no use without an NVIDIA GPU.
install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' constraints.txt)
    local installed='import sys, importlib.metadata as m; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])'
    if "$python" -c "$installed" "$version" 2>/dev/null; then return; fi

    local install=("$python" -m pip install "$bytecode" --no-deps --retries 2 --timeout 30)
    if [[ -n ${TORCH_INDEX:-} ]]; then
        "${install[@]}" --index-url "$TORCH_INDEX" "torch==$version"
    elif [[ $(uname -s) == Linux ]] && ! has_nvidia_gpu; then
        # A mirror that pip is configured with may have the CPU build. PyPI has not, and says so at once.
        "${install[@]}" "torch==$version+cpu" 2>/dev/null ||
            "${install[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" ||
            say "no CPU build of torch $version can be reached: taking the one with CUDA libraries instead."
    fi
}

is_sound() { "$python" -c "import sys; sys.exit(sys.prefix != sys.argv[1])" "$venv" && "$python" -m pip --version; }

cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! is_sound >/dev/null 2>&1; then
    base_python=$(find_python)
    say "making .venv with $base_python: once, and a few minutes, most of them for torch."
    "$base_python" -m venv --clear "$venv"
fi
rm -f "$stamp"
install_torch
"$python" -m pip install "$bytecode" -c constraints.txt -e ".[test,bench,plots]"
printf '%s' "$wanted" >"$stamp"
say "$("$python" -c 'import sys, torch; print(f"done: Python {sys.version.split()[0]}, torch {torch.__version__}")')"
