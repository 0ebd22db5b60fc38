"""``shardopt top``: shows what ``opt.monitor(path)`` writes, with a column for each rank."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.inspect import size
from ..errors import ShardoptError
from .terminal import CommandResult, console
from .text_table import aligned

_EVERY = 1.0  # seconds


def add_top(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    top = commands.add_parser(
        "top",
        help="show a training that runs: memory, timings, norm, skipped steps, traffic",
        description="Shows what opt.monitor(PATH) writes: a column a rank. On a terminal with Rich it is updated "
        "every second until it is interrupted; elsewhere, and with --once or --json, it is shown once.",
    )
    top.add_argument("path", metavar="PATH", type=Path, help="the directory that opt.monitor() was given")
    top.add_argument("--once", action="store_true", help="show it once")
    top.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> CommandResult:
    found = read(options.path)
    # FORCE_COLOR, which many CI machines set, is only about colours: a live view into a file would never end.
    is_live = sys.stdout.isatty() and not options.once and not options.json
    screen = console(sys.stdout) if is_live else None
    if screen is None:
        return CommandResult({"ranks": found}, table(found))
    from rich.live import Live

    try:
        with Live(table(found), console=screen, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY)
                live.update(table(read(options.path)), refresh=True)
    except KeyboardInterrupt:  # the user ends the live view
        return CommandResult({}, "")


def read(directory: Path) -> list[dict[str, Any]]:
    """Returns what each rank of the latest training has written, in the order of ranks.

    Raises:
        ShardoptError: the directory has no such files, or other ones.
    """
    files = sorted(directory.glob("rank*.json"))
    try:
        found = [_checked(json.loads(file.read_text())) for file in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardoptError(f"{directory} holds files that opt.monitor() did not write ({error!r}).") from None
    if not found:
        raise ShardoptError(
            f"call opt.monitor({str(directory)!r}) in the training, whose first step writes: {directory} holds nothing "
            "that opt.monitor() wrote."
        )
    # An earlier training with more ranks may have left files.
    ranks = max(found, key=lambda each: each["time"])["ranks"]
    return sorted((each for each in found if each["rank"] < ranks), key=lambda each: each["rank"])


def _checked(found: Any) -> dict[str, Any]:
    numbers = {**{name: found[name] for name in ("rank", "ranks", "time")}, **found["facts"]}
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, which is not a number")
    return {**found, "facts": dict(found["facts"])}


def table(found: list[dict[str, Any]]) -> str:
    """Returns a table with a row for each fact and a column for each rank."""
    names = list(dict.fromkeys(name for each in found for name in each["facts"]))
    rows = [["", *(f"rank {each['rank']}" for each in found)]]
    rows += [[name, *(_cell(name, each["facts"]) for each in found)] for name in names]
    rows.append(["written", *(f"{max(time.time() - each['time'], 0):.0f} s ago" for each in found)])
    return aligned(rows)


def _cell(name: str, facts: Mapping[str, float]) -> str:
    value = facts.get(name)
    if value is None:
        return "-"
    kind = name.partition("/")[0]
    if kind in ("memory", "traffic"):
        return size(value)
    return f"{1e3 * value:.2f} ms" if kind == "seconds" else f"{value:.6g}"
