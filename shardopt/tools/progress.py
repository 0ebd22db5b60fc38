"""One line of progress on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..checkpoint.inspect import size


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows progress on a terminal in one line; nothing elsewhere, and nothing for what ends at once.

    Yields what is told how many bytes were done.
    """
    start = last = time.monotonic()
    done, is_shown = 0, False

    def advance(nbytes: int) -> None:
        nonlocal done, last, is_shown
        done += nbytes
        now = time.monotonic()
        if sys.stderr.isatty() and now - last > 0.3:
            last, is_shown = now, True
            rate = done / (now - start)
            told = f"{done / max(total, 1):4.0%} of {size(max(total, 1))}, {size(rate)}/s"
            print(f"\r{what}: {told}, {(total - done) / rate:.0f} s left   ", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
