"""Builds libraries in place of NVIDIA's, into an environment that holds PyTorch's CUDA build.

``python build.py HEADERS``: a folder with the headers of the CUDA runtime, of the version that torch asks for.

The stand-ins of libcudart, libnccl and what Triton calls of libcuda are compiled from ``runtime/``. All other libraries
of NVIDIA's that torch is linked with (cuBLAS, cuDNN and the like) become stubs: functions that do nothing and succeed.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
SITE = Path(sysconfig.get_paths()["purelib"])
TORCH = SITE / "torch"
LIBRARIES = SITE / "nvidia" / "cu13" / "lib"  # where torch's libraries look for NVIDIA's
# Which names belong to which library: torch's own do not say.
PREFIXES = {
    "libcublas.so.13": "cublas(?!Lt)", "libcublasLt.so.13": "cublasLt", "libcudnn.so.9": "cudnn",
    "libcufft.so.12": "cufft", "libcufile.so.0": "cuFile", "libcupti.so.13": "cupti", "libcurand.so.10": "curand",
    "libcusolver.so.12": "cusolver", "libcusparse.so.12": "cusparse(?!Lt)", "libcusparseLt.so.0": "cusparseLt",
    "libnvrtc.so.13": "nvrtc", "libnvshmem_host.so.3": "nvshmem",
}  # fmt: skip
CUDART, CUDA, NCCL = "libcudart.so.13", "libcuda.so.1", "libnccl.so.2"
# What becomes of functions of theirs that torch names and that are not there: its result, and whether it is told.
NOT_THERE = {CUDART: (801, True), CUDA: (0, False), NCCL: (4, True)}  # not supported; fine; an invalid argument
OF_CUDART = ("queues", "memory", "copies", "streams", "device", "counts")
OF_CUDA = ("driver",)
OF_NCCL = ("board", "communicator", "collectives", "messages", "nccl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("headers", type=Path)
    headers = parser.parse_args().headers
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    sources, built = made_of(), LIBRARIES / "built"
    if built.exists() and built.read_text() == sources:
        return
    wanted = wanted_names(sorted((TORCH / "lib").glob("*.so")))
    compile_library(CUDART, OF_CUDART, [f"-I{headers}"], wanted, "(__)?cuda")
    for library, prefix in PREFIXES.items():
        stub(library, {name for name in wanted if re.match(prefix, name)}, wanted)
    compile_library(CUDA, OF_CUDA, [f"-I{headers}"], wanted, "cu(?!File)[A-Z]")
    compile_library(NCCL, OF_NCCL, [f"-I{headers}", "-lrt"], wanted, "p?nccl")
    compile_operations(headers)
    built.write_text(sources)


def made_of() -> str:
    """What the libraries are built of: as long as it stays, they do."""
    files = [Path(__file__), *sorted(SOURCES.iterdir()), TORCH / "version.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def wanted_names(binaries: Iterable[Path]) -> dict[str, str]:
    """The names that torch's libraries ask others for, each with its version or ""."""
    command = ["nm", "-D", "--undefined-only", *map(str, binaries)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(match.groups("") for match in re.finditer(r"\bU (\w+)(?:@+(\S+))?", text))


def defined_names(binary: Path) -> set[str]:
    text = subprocess.run(["nm", "-D", "--defined-only", binary], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in text.splitlines()}


def stub(library: str, names: set[str], wanted: dict[str, str]) -> None:
    """A library of functions that return 0, as those do that make a handle, ask for a version or set an option."""
    source = "typedef void* P;\n" + "".join(stub_of(name) for name in sorted(names))
    by_version = defaultdict(list)
    for name in sorted(names):
        by_version[wanted[name]].append(name)
    versions = "".join(f"{version} {{ global: {'; '.join(of)}; }};\n" for version, of in by_version.items() if version)
    link(library, ["-w", "-x", "c", "-", "-x", "none", str(LIBRARIES / CUDART)], versions, source)


def stub_of(name: str) -> str:
    if name == "cublasLtMatmulAlgoGetHeuristic":  # how many ways it found: without one torch takes another function
        return f"long {name}(P a, P b, P c, P d, P e, P f, P g, int n, P h, int* found) {{ *found = 1; return 0; }}\n"
    counted = "without_gpu_count(2); " if re.search("gemm|Gemm|cublasLtMatmul$", name) else ""
    return f"long {name}(void) {{ {counted}return 0; }}\n"


def compile_library(library: str, files: Iterable[str], flags: list[str], wanted: dict[str, str], prefix: str) -> None:
    """What it does not have of the names that torch wants returns an error, which says which one it was."""
    paths = [str(SOURCES / f"{file}.cpp") for file in files]
    common = ["-std=c++17", "-O1", "-Wall", "-Wno-unused-result", *paths, *flags]
    if library != CUDART:
        common.append(str(LIBRARIES / CUDART))
    version = f"{library} {{ global: *; }};\n" if library == CUDART else ""
    link(library, common, version)
    missing = {name for name in wanted if re.match(prefix, name)} - defined_names(LIBRARIES / library)
    code, is_told = NOT_THERE[library]
    tell = 'fprintf(stderr, "[GPU stand-in] %s is not there\\n", __func__); ' if is_told else ""
    rest = "".join(f'extern "C" int {name}() {{ {tell}return {code}; }}\n' for name in sorted(missing))
    link(library, [*common, "-x", "c++", "-"], version, "#include <cstdio>\n" + rest)


def link(library: str, arguments: list[str], versions: str, source: str = "") -> None:
    script = LIBRARIES / f"{library}.versions"
    script.write_text(versions)
    options = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-pthread", "-o", str(LIBRARIES / f"{library}.new")]
    if versions:
        options.append(f"-Wl,--version-script,{script}")
    compiler = "gcc" if "c" in arguments else "g++"
    subprocess.run([compiler, *options, *arguments], check=True, input=source, text=True)
    script.unlink()
    (LIBRARIES / f"{library}.new").replace(LIBRARIES / library)  # a process that runs keeps the one that it has


def compile_operations(headers: Path) -> None:
    """PyTorch's operations on the device: an extension that ``installed.py`` loads."""
    includes = [TORCH / "include", TORCH / "include/torch/csrc/api/include", headers]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", str(SOURCES / "operations.cpp")]
    command += [f"-I{path}" for path in includes] + [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    command += [str(LIBRARIES / CUDART), f"-Wl,-rpath,{TORCH / 'lib'}", "-o", str(LIBRARIES / "operations.new")]
    subprocess.run(command, check=True)
    (LIBRARIES / "operations.new").replace(LIBRARIES / "operations.so")


if __name__ == "__main__":
    sys.exit(main())
