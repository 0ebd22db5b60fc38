"""How much memory this process holds, and held at most."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardopt.partition.memory import return_free_pages


def resident() -> int:
    """Bytes, once all that is free has been given back."""
    gc.collect()
    return_free_pages()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Peak:
    """The most bytes that were resident above those before; known once the context has ended."""

    nbytes = 0


@contextmanager
def peak_above() -> Iterator[Peak]:
    """A context that asks the system for this process's peak in it."""
    found, before = Peak(), resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    yield found
    status = Path("/proc/self/status").read_text()
    most = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    found.nbytes = max(0, most - before)
