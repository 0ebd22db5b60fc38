"""What the benchmarks share: order statistics, the machine in words, results as dated JSON, options and tables."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardopt.kernels.formats import FP32, BlockFormat
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CONSOLE = Console(width=None if sys.stdout.isatty() else 150)


# ---- Statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Median:
    """A median with the interval that holds the true one with 95 % confidence, whatever the distribution."""

    median: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{_digits(self.median)} [{_digits(self.low)}, {_digits(self.high)}]"

    def as_json(self) -> dict[str, Any]:
        return {key: _rounded(value) for key, value in asdict(self).items()}


def median_of(samples: Sequence[float]) -> Median:
    """The median and its interval from order statistics; below 6 samples the interval is their range (under 95 %)."""
    ordered = sorted(samples)
    n = len(ordered)
    # The k-th smallest and k-th largest miss the median only if fewer than k samples fall on one side of it.
    k, missed = 0, 0.0
    while k < n // 2 and (missed := missed + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    k = max(k, 1)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Median(middle, ordered[k - 1], ordered[n - k], n)


def ratios(of: Sequence[float], over: Sequence[float]) -> Median:
    """The median of the ratios of pairs that were measured one right after the other."""
    return median_of([one / other for one, other in zip(of, over, strict=True)])


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time until all that it asked of the device is done."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def bytes_per_element(spec: Spec) -> float:
    """Bytes that one pass of a kernel reads and writes for each element, tables aside."""
    written = [spec.param, *([spec.master] if spec.has_master and spec.master is not None else []), *spec.states]
    both = sum(each.itemsize for each in written)
    scales = sum(FP32.itemsize / BLOCK for each in spec.states if isinstance(each, BlockFormat))
    unread = spec.param.itemsize if spec.has_master and spec.master is FP32 and not spec.compares else 0
    return spec.grad.itemsize + 2 * (both + scales) - unread


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


# ---- The machine -----------------------------------------------------------------------------------------------------


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a number depends on; no host names and no paths."""
    machine: dict[str, Any] = {
        "device": device_name(device),
        "cpu": _cpu_name(),
        "cores": _cores(),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numba": _version("numba"),
        "commit": _commit(),
    }
    if device.type == "cuda":
        machine["cuda"] = torch.version.cuda or torch.version.hip
        machine["GPU memory GiB"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30)
    return machine


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cpu_name()}, {_cores()} cores"


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "shardopt")
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- Options and results ---------------------------------------------------------------------------------------------


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser whose ``--help`` shows the script's docstring, and the options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it works, not numbers to keep")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="directory of the result's JSON (default: bench/results; nothing is written with --quick alone)",
    )
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows_itself = action.default in (None, False) or "default:" in (action.help or "")
        return action.help if shows_itself else super()._get_help_string(action)


def write_result(name: str, args: argparse.Namespace, device: torch.device, results: Any) -> None:
    """Write ``results`` with the settings and the machine to ``YYYY-MM-DD-<name>-<device>.json``."""
    if args.quick and args.out is None:
        return
    directory = args.out or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    path = directory / f"{date.today().isoformat()}-{name}{'-quick' if args.quick else ''}-{slug}.json"
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    content = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "machine": describe_machine(device),
        "settings": settings,
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n")
    CONSOLE.print(f"written: {path}", highlight=False)


def _plain(value: Any) -> Any:
    return value.as_json() if isinstance(value, Median) else str(value)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)
