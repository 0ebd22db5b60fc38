"""The result of a command, how a terminal shows it (text with colours, or JSON), and the exit code.

A command returns a :class:`CommandResult` and prints nothing itself. Rich (the extra ``terminal``) adds colours on a
terminal, unless ``NO_COLOR`` is set.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar

from ..errors import ShardoptError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_CODES = """exit codes:
  0    done, and all is well
  1    the answer is no (bits differ, damaged, nothing fits), or what was asked for could not be done
  2    the command line is wrong; nothing was done
  3    a bug in shardopt: `python -X dev -m shardopt ...` shows where
  130  interrupted"""

# Patterns of the words that are coloured; the text is the same without colours.
_HIGHLIGHTS = (
    r"(?P<good>^whole\b|\byes$|all bits are equal|^cheapest that fits|\bworks$)",
    r"(?P<bad>^DAMAGED\b|\bno$|BITS DIFFER|^none fits|\bmissing:|\brefused\b)",
    r"(?P<soft>^with less precision|^-[- ]+$)",
    r"(?P<code>^    Sharded\w+\(.*\)$)",
)
_STYLES = {"good": "green", "bad": "bold red", "soft": "dim", "code": "cyan"}


@dataclass(frozen=True)
class CommandResult:
    """What a command found.

    Attributes:
        data: for ``--json``: numbers, strings, lists and dicts; Inf and NaN are printed as null.
        text: for people.
        is_yes: False if the answer is no, for exit code 1.
        problem: in words, why the command could not do all; printed to the standard error, with exit code 1.
    """

    data: dict[str, Any]
    text: str
    is_yes: bool = True
    problem: str = ""


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def console(file: IO[str]) -> "Console | None":
    """Returns Rich's console on a terminal, if Rich is installed; it honours NO_COLOR and FORCE_COLOR itself."""
    if not (file.isatty() or os.environ.get("FORCE_COLOR")) or not has_rich():
        return None
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Words(RegexHighlighter):
        base_style = "shardopt."
        highlights: ClassVar = list(_HIGHLIGHTS)

    theme = Theme({f"shardopt.{name}": style for name, style in _STYLES.items()})
    return Console(file=file, highlighter=Words(), theme=theme, soft_wrap=True, emoji=False, markup=False)


def show(result: CommandResult, as_json: bool) -> int:
    """Prints a result; returns the exit code."""
    if as_json:
        print(json.dumps(_finite(result.data), indent=2, allow_nan=False))
    elif result.text:
        # With NO_COLOR, Rich still prints bold letters.
        screen = None if os.environ.get("NO_COLOR") else console(sys.stdout)
        # Line by line: patterns match at the begin and end of a line.
        for line in result.text.splitlines():
            print(line) if screen is None else screen.print(line)
    if result.problem:
        fail(result.problem)
    return int(not result.is_yes or bool(result.problem))


def _finite(value: Any) -> Any:
    """Returns the value with None for Inf and NaN: JSON lacks them, and most parsers refuse Python's spelling."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str) -> None:
    """Prints an error on one line."""
    print(f"error: {message}", file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Runs the given command; prints errors on one line, without a traceback."""
    try:
        code = show(options.run(options), options.json)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has ended; without devnull Python fails again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ShardoptError, OSError, MemoryError) as error:
        fail(str(error) or type(error).__name__)
        return 1
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        fail(
            f"a bug in shardopt, please report it ({type(error).__name__}: {error}). python -X dev -m shardopt shows "
            "where."
        )
        return 3
