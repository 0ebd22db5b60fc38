"""What a command answers, and how a terminal shows it: text with colours, or JSON; and the exit code.

A command computes an :class:`Answer` and prints nothing itself. Colours come from Rich (the extra ``terminal``),
and only where a person reads: on a terminal, without ``NO_COLOR``.
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

# What stands out, by its words: texts are the same with and without colours.
_HIGHLIGHTS = (
    r"(?P<good>^whole\b|\byes$|all bits are equal|^cheapest that fits|\bworks$)",
    r"(?P<bad>^DAMAGED\b|\bno$|BITS DIFFER|^none fits|\bmissing:|\brefused\b)",
    r"(?P<soft>^with less precision|^-[- ]+$)",
    r"(?P<code>^    Sharded\w+\(.*\)$)",
)
_STYLES = {"good": "green", "bad": "bold red", "soft": "dim", "code": "cyan"}


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        data: for ``--json``: numbers, texts, lists and dicts of them; what is Inf or NaN is shown as null.
        text: for people.
        is_yes: False: the answer is no, exit code 1.
        problem: what was wrong with the question; it goes to the standard error, with exit code 1.
    """

    data: dict[str, Any]
    text: str
    is_yes: bool = True
    problem: str = ""


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def console(file: IO[str]) -> "Console | None":
    """Rich's, where a person reads and it is installed; it honours NO_COLOR and FORCE_COLOR itself."""
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


def show(answer: Answer, as_json: bool) -> int:
    """Prints an answer; returns the exit code."""
    if as_json:
        print(json.dumps(_finite(answer.data), indent=2, allow_nan=False))
    elif answer.text:
        # Rich leaves bold letters with NO_COLOR.
        screen = None if os.environ.get("NO_COLOR") else console(sys.stdout)
        # Line by line: words are looked for at a line's beginning and end.
        for line in answer.text.splitlines():
            print(line) if screen is None else screen.print(line)
    if answer.problem:
        fail(answer.problem)
    return int(not answer.is_yes or bool(answer.problem))


def _finite(value: Any) -> Any:
    """Inf and NaN as None: JSON has no words for them, and most parsers refuse Python's."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str) -> None:
    """Prints an error on one line."""
    print(f"error: {message}", file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Runs the command that was given; prints errors on one line, without a traceback."""
    try:
        code = show(options.run(options), options.json)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has ended; without devnull Python fails again when it flushes at its end
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
