"""Write what pages and docstrings tell of options, from the fields of the dataclasses that hold them.

Tables in docs/optimizers.md and docs/options.md; what an editor shows of a keyword (``OptionKeywords`` in
shardopt/config/keywords.py), and of an optimizer (the paragraph "Keywords of ..." in shardopt/optim/).

python scripts/options.py            rewrite them
python scripts/options.py --check    exit code 1 if that would change something (a test asks)
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardopt import Offload, Tuning
from shardopt.config import Options
from shardopt.option import default_in_words, in_words, options_of

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
PAGES: dict[str, tuple[type[Any], ...]] = {"docs/optimizers.md": (Options,), "docs/options.md": (Tuning, Offload)}
COLUMN = {Options: "keyword", Tuning: "`Tuning(...)`", Offload: "`Offload(...)`"}


def default_of(value: Any) -> str:
    if isinstance(value, Tuning):
        return "`Tuning()`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // MIB} MiB"
    return f"`{value!r}`" if isinstance(value, tuple) else str(value)


def table(options: type[Any]) -> str:
    lines = [f"| {COLUMN[options]} | default | meaning |", "|---|---|---|"]
    for field, about in options_of(options):
        meaning = about.meaning + "; may differ between ranks" * bool(about.local)
        lines.append(f"| `{field.name}` | {default_of(field.default)} | {meaning} |")
    return "\n".join(lines)


def written(text: str, kinds: tuple[type[Any], ...]) -> str:
    for options in kinds:
        begin, end = (
            f"<!-- {options.__name__}: written by scripts/options.py -->",
            f"<!-- end of {options.__name__} -->",
        )
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table(options)}\n{end}{rest.split(end)[1]}"
    return text


def with_meanings(text: str) -> str:
    """The source of ``OptionKeywords`` with the meaning of each keyword below it."""
    before, begin, fields = text.partition("class OptionKeywords(TypedDict, total=False):\n")
    words = {field.name: in_words(about) for field, about in options_of(Options)}
    fields = re.sub(r'(^    \w+: .+\n)    """(?:.|\n)*?"""\n', r"\1", fields, flags=re.MULTILINE)
    return (
        before
        + begin
        + re.sub(r"^    (\w+): .+\n", lambda found: found[0] + quoted(words[found[1]]), fields, flags=re.M)
    )


def quoted(words: str) -> str:
    lines = textwrap.wrap(f'"""{words}."""', 116)
    if len(lines) > 1:
        lines = [*textwrap.wrap(f'"""{words}.', 116), '"""']
    return textwrap.indent("\n".join(lines), "    ") + "\n"


def with_keywords(text: str) -> str:
    """The source of an optimizer with all keywords and their defaults in its docstring."""
    listed = ", ".join(default_in_words(field) for field, _ in options_of(Options))
    begin = "Keywords of :class:`shardopt.config.Options`:"
    paragraph = textwrap.fill(f"{begin} {listed}.", 116, break_long_words=False)
    return re.sub(rf" *{begin}(?:.|\n)*?\n(?=\n|    \"\"\")", lambda _: textwrap.indent(paragraph, "    ") + "\n", text)


WRITTEN: dict[str, Callable[[str], str]] = {
    **{page: partial(written, kinds=kinds) for page, kinds in PAGES.items()},
    "shardopt/config/keywords.py": with_meanings,
    "shardopt/optim/classes.py": with_keywords,
    "shardopt/optim/adafactor.py": with_keywords,
    "shardopt/optim/large_batch.py": with_keywords,
    "shardopt/optim/muon.py": with_keywords,
    "shardopt/optim/optimizer.py": with_keywords,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, tell whether something would change")
    is_check, stale = parser.parse_args().check, []
    for page, write in WRITTEN.items():
        path = ROOT / page
        text = path.read_text()
        new = write(text)
        if new != text:
            stale.append(page)
            if not is_check:
                path.write_text(new)
    if stale and is_check:
        print(f"out of date: {', '.join(stale)}. Run: python scripts/options.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
