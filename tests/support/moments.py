"""Moments that a test makes: a process says how far it has come, and another one waits for that.

::

    moments = Moments(tmp_path)                 # a folder that all of them see
    moments.say("rank 0 saves")                 # in the one
    moments.wait("rank 0 saves")                # in the other

So the order of what processes do is the test's, whatever the pace of the machine. The deadline only bounds a hang.
"""

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 400.0  # seconds; less than a job of ``ranks.py`` may take, which is then not what tells of the hang


class Moments:
    """What processes said, as empty files in one folder."""

    def __init__(self, folder: Path | str):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def say(self, what: str) -> None:
        (self._folder / what).touch()

    def was_said(self, what: str) -> bool:
        return (self._folder / what).exists()

    def wait(self, *what: str) -> None:
        """Waits until all of it was said."""
        until(lambda: all(map(self.was_said, what)), f"all of {what} to be said")


def until(is_true: Callable[[], bool], what: str) -> None:
    """Waits until something is true."""
    end = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < end, f"waited for {what} in vain, for {DEADLINE:g} s"
        time.sleep(0.001)
