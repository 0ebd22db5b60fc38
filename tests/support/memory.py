"""How much memory this process holds."""

import gc
import os
from pathlib import Path

from shardopt.partition.memory import return_free_pages


def resident() -> int:
    """Bytes, once all that is free has been given back."""
    gc.collect()
    return_free_pages()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
