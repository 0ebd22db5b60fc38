"""``shardopt doctor``: prints what a bug report needs, and what the machine can do. Takes under 3 s."""

import argparse
import contextlib
import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .terminal import CommandResult

_PACKAGES = ("shardopt", "torch", "triton", "numba", "numpy", "transformers", "accelerate", "lightning")


def add_doctor(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="print versions, devices, limits: what a bug report needs",
        description="Prints versions, devices, backends, limits of memory, and whether direct I/O works in a folder.",
    )
    doctor.add_argument("path", nargs="?", type=Path, default=Path(), help="to try direct I/O in (default: here)")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> CommandResult:
    facts = facts_of(options.path)
    problem = f"{options.path} is not a directory, so direct I/O was not tried" * (not options.path.is_dir())
    return CommandResult(facts, report(facts), problem=problem)


def report(facts: Mapping[str, str]) -> str:
    """Returns one fact a line."""
    return "\n".join(f"{name:<18} {value}" for name, value in facts.items())


def facts_of(path: Path) -> dict[str, str]:
    """Returns the facts by name. ``path``: a directory in which direct I/O is tried."""
    return dict(_facts(path))


def _facts(path: Path) -> Iterator[tuple[str, str]]:
    yield "python", f"{sys.version.split()[0]} on {platform.platform()}"
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    yield "cpu", f"{os.cpu_count()} cores, {len(os.sched_getaffinity(0))} for this process, {platform.machine()}"
    yield "memory", _memory()
    yield "devices", _devices()
    yield "C compiler", _compiler()
    yield "backends", ", ".join(_backends()) or "none"
    yield "pinned memory", _limit(resource.RLIMIT_MEMLOCK)
    yield "open files", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield "neighbours", _neighbours()
    yield "direct I/O", f"{path}: {_direct_io(path)}"


def _memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{pages / 2**30:.1f} GiB"
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(name).read_text())
            if limit < pages:
                text += f", {limit / 2**30:.1f} GiB of it for this control group"
            break
    return text


def _devices() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    kinds = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in kinds)


def _compiler() -> str:
    """Returns whether Triton can compile its launchers, which it does at the first step on a GPU."""
    # Without these the first step fails, after minutes of loading. Test:
    # test_doctor_looks_for_what_triton_compiles_with in tests/tools/test_plan.py.
    named = os.environ.get("CC")
    found = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [*([] if found else ["a C compiler (gcc or clang, or CC)"]), *([] if header.exists() else [str(header)])]
    if missing:
        return f"missing: {' and '.join(missing)}; Triton needs both at the first step on a GPU"
    return f"{found}, {header}"


def _backends() -> Iterator[str]:
    if dist.is_available():
        for name in ("gloo", "nccl", "mpi", "ucc"):
            if getattr(dist, f"is_{name}_available", lambda: False)():
                yield name


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "no limit" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB (ulimit -l; CUDA's is apart)"


def _neighbours() -> str:
    """Returns how CPU ranks of one machine may read each other's memory."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    found = scope.read_text().strip() if scope.exists() else "0"
    return "ranks may read each other's memory" if found in ("0", "1") else f"through sockets (ptrace_scope {found})"


def _direct_io(path: Path) -> str:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return "not known to this system"
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file, mmap.mmap(-1, 4096) as page:
            handle = os.open(file.name, os.O_RDWR | flag)
            try:
                written, read = os.pwrite(handle, page, 0), os.preadv(handle, [page], 0)
            finally:
                os.close(handle)
            return "works" if written == read == 4096 else f"short: {written} bytes written, {read} read"
    except OSError as error:
        return f"refused ({error.strerror})"
