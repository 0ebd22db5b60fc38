#!/usr/bin/env bash
# Run the tests that need GPUs on a machine without one: PyTorch's CUDA build on stand-ins of CUDA and NCCL.
#
#   bash scripts/gpu_without_gpu.sh                 all of them, and the result as JSON under bench/results
#   bash scripts/gpu_without_gpu.sh -x tests/gpu    any argument goes to pytest; no result is written
#   bash scripts/gpu_without_gpu.sh --null SCRIPT   a script on a null device, where nothing computes: the host's time
#
# It makes an environment of its own once: 2 GB, of which 0.5 GB come from the package index, and a minute of gcc and g++.
# Heavier than the other tests and made for one kind of machine (Linux, x86-64), so no part of every run; what the
# stand-ins are is in tests/support/without_gpu/__init__.py.
#
# Environment:
#   PYTHON       the interpreter to use, 3.11 to 3.14 (default: python3)
#   GPU_VENV     where the environment is (default: .venv-gpu of the checkout)
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
cd "$root"
venv=${GPU_VENV:-$root/.venv-gpu}
python=$venv/bin/python
# Those of the runtime that PyPI's build of the pinned torch is made for.
headers=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88)
export PIP_DISABLE_PIP_VERSION_CHECK=1

pin() { grep "^$1==" constraints.txt; }

install() {
    "${PYTHON:-python3}" -m venv --clear "$venv"
    # A mirror that pip is configured with may have the CPU build, whose version counts as a later one.
    if ! "$python" -m pip install --no-deps "$(pin torch)" ||
        "$python" -c 'import importlib.metadata as m; raise SystemExit("+cpu" not in m.version("torch"))'; then
        PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="" PIP_EXTRA_INDEX_URL="" "$python" -m pip install --no-deps \
            --force-reinstall --index-url "${CUDA_INDEX:-https://pypi.org/simple}" "$(pin torch)"
    fi
    "$python" -m pip install -c constraints.txt triton numba numpy einops safetensors pytest pytest-xdist \
        pytest-randomly hypothesis expecttest coverage psutil rich tqdm filelock typing-extensions sympy networkx jinja2 fsspec
    "$python" -m pip download -q --no-deps -d "$venv/headers" "${headers[@]}"
    local wheel
    for wheel in "$venv"/headers/*.whl; do "$python" -m zipfile -e "$wheel" "$venv/headers"; done
}

wanted="$root
$(cat constraints.txt "${BASH_SOURCE[0]}")"
if ! [[ -x $python && -f $venv/.complete && $(<"$venv/.complete") == "$wanted" ]]; then
    install
    printf '%s' "$wanted" >"$venv/.complete"
fi

# An entry point that torch calls when it is imported.
entry=$(echo "$venv"/lib/python3.*/site-packages)/gpu_without_gpu-0.dist-info
mkdir -p "$entry"
printf 'Metadata-Version: 2.1\nName: gpu-without-gpu\nVersion: 0\n' >"$entry/METADATA"
printf '[torch.backends]\ngpu = tests.support.without_gpu.installed:install\n' >"$entry/entry_points.txt"

# Every process that imports torch loads the stand-ins; see installed.py.
export PYTHONPATH=$root TRITON_INTERPRET=0 TRITON_CACHE_DIR=$root/.test_cache/triton-gpu OMP_NUM_THREADS=1
export WITHOUT_GPU_COUNT=4
"$python" tests/support/without_gpu/build.py "$venv/headers/nvidia/cu13/include"

if [[ ${1:-} == --null ]]; then
    libraries=$(echo "$venv"/lib/python3.*/site-packages/nvidia/cu13/lib)
    export WITHOUT_GPU_NULL=1 TRITON_LIBCUDA_PATH=$libraries LD_LIBRARY_PATH=$libraries
    exec "$python" "${@:2}"
fi
if (($#)); then
    exec "$python" -m pytest -p no:cacheprovider -m gpu "$@"
fi
exec "$python" tests/support/without_gpu/record.py
