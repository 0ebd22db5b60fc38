"""Write the tables of options in README.md and docs/options.md from the fields of the dataclasses that hold them.

python scripts/options.py            rewrite what stands between their markers
python scripts/options.py --check    exit code 1 if that would change something (a test asks)
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from shardopt import Offload, Tuning
from shardopt.config import Options
from shardopt.option import told

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
PAGES: dict[str, tuple[type[Any], ...]] = {"README.md": (Options,), "docs/options.md": (Tuning, Offload)}
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
    for field, said in told(options):
        meaning = said.meaning + "; may differ between ranks" * bool(said.local)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, tell whether something would change")
    is_check, stale = parser.parse_args().check, []
    for page, kinds in PAGES.items():
        path = ROOT / page
        text = path.read_text()
        new = written(text, kinds)
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
