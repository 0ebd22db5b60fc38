"""Pages that tell the events of something in their order, in tables whose rows name a file and a function each.

::

    ## Stage 2
    | 1 | the module's forward begins | `module/takeover.py` `ModuleTakeover._pre_forward` |
"""

import ast
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from tests.support.paths import ROOT

PACKAGE = ROOT / "shardopt"
NAMED = re.compile(r"`([a-z0-9_/]+\.py)` `([A-Za-z0-9_.]+)`")
_ROW = re.compile(r"^\| \d+ \|.*\| `([a-z0-9_/]+\.py)` `([A-Za-z0-9_.<>]+)` \|$")


def told(page: Path) -> dict[str, list[str]]:
    """Heading -> what its table names, as "file:function"."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and line[2].isdigit():
            match = _ROW.match(line)
            assert match is not None, line
            found.setdefault(heading, []).append(":".join(match.groups()))
    return found


@contextmanager
def noted_calls() -> Iterator[list[str]]:
    """Yields the package's functions that are called within, in order, in threads that begin within too."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            calls.append(f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def check_order(events: Sequence[str], calls: Sequence[str]) -> None:
    """Each event of a table is called after the one of the row above it."""
    at = 0
    for event in events:
        assert event in calls, f"{event} is not called"
        assert event in calls[at:], f"{event} is called before the row above it, and not after"
        at = calls.index(event, at) + 1


@cache
def functions_in(path: Path) -> dict[str, ast.AST]:
    """The classes and functions of a file, by qualified name."""

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                yield f"{prefix}{each.name}", each
                yield from within(each, f"{prefix}{each.name}.")

    return dict(within(ast.parse(path.read_text()), ""))


def check_names(page: Path) -> None:
    """All files and functions that the page names are there."""
    text = page.read_text()
    for path, name in NAMED.findall(text):
        assert name in functions_in(PACKAGE / path), f"{path} has no {name}"
    for path in re.findall(r"`([a-z0-9_/]+\.py)`", text):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path
