"""Which files of tests are given to one worker of pytest-xdist: those that share a process that is dear to begin.

A worker begins the process in which Triton compiles (``ptx/process.py``) for 7 seconds of processor, and the fork
server with frameworks (``preload_frameworks.py``) for 4, and keeps each for all of its files.
"""

from functools import cache

from tests.support.paths import ROOT

# The process -> what the files say that need it.
SAID = {
    "compiling": ("compiling: Compiling",),
    "frameworks": ("frameworks=True", "ranks_with_frameworks"),
}


def place_of(nodeid: str) -> str:
    """Tests of one place run in one worker."""
    return _place_of_file(nodeid.partition("::")[0])


@cache
def _place_of_file(name: str) -> str:
    text = (ROOT / name).read_text()
    return next((process for process, words in SAID.items() if any(word in text for word in words)), name)
