"""Progress bars on a terminal, for work that takes a while."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..checkpoint.inspect import size
from .terminal import console

Item = TypeVar("Item")
_SOON = 0.5  # seconds; shorter work shows no bar


@contextmanager
def progress(what: str, total: int, is_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, unless the work ends at once; without Rich it is one line of text.

    Yields:
        A function that takes the amount that was done.
    """
    start = time.monotonic()
    bar: _Bar | _Line | None = None
    done = 0

    def advance(amount: int) -> None:
        nonlocal bar, done
        done += amount
        if bar is None and sys.stderr.isatty() and time.monotonic() - start > _SOON:
            bar = _Bar(what, total, is_bytes) if console(sys.stderr) is not None else _Line(what, total, is_bytes)
        if bar is not None:
            bar.show(done, time.monotonic() - start)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.end()


def each_of(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yields the items, and shows a bar."""
    with progress(what, len(items), is_bytes=False) as advance:
        for item in items:
            yield item
            advance(1)


class _Bar:
    """A bar of Rich's."""

    def __init__(self, what: str, total: int, is_bytes: bool):
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        amount = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
        columns = TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn()
        self._progress = Progress(*columns, console=console(sys.stderr), transient=True)
        self._task = self._progress.add_task(what, total=max(total, 1))
        self._progress.start()

    def show(self, done: int, seconds: float) -> None:
        self._progress.update(self._task, completed=done)

    def end(self) -> None:
        self._progress.stop()


class _Line:
    """A line that is overwritten."""

    def __init__(self, what: str, total: int, is_bytes: bool):
        self._what, self._total, self._is_bytes = what, max(total, 1), is_bytes
        self._last = 0.0

    def show(self, done: int, seconds: float) -> None:
        if not done or seconds - self._last < 0.3:
            return
        self._last, rate = seconds, done / seconds
        of = f"of {size(self._total)}, {size(rate)}/s" if self._is_bytes else f"of {self._total}"
        left = (self._total - done) / rate
        line = f"\r{self._what}: {done / self._total:4.0%} {of}, {left:.0f} s left   "
        print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
