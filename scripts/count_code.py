"""Counts lines of code in the package: without docstrings, comments and blank lines.

python scripts/count_code.py            by folder, by group, and in all
python scripts/count_code.py --files    by file too
python scripts/count_code.py --write    write the groups to tests/house/code_counts.json
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "shardopt"
# What tests/house compares with: a second way beside the first one shows as lines.
TABLE = ROOT / "tests" / "house" / "code_counts.json"
_HOT_PATH = (
    "module/*.py",
    "step/*.py",
    "partition/reducer.py",
    "tensors/gradient*.py",
    "domain/listed.py",
    "domain/shard_tables.py",
)
# Name -> which files of the package.
GROUPS = {
    "hot path": _HOT_PATH,
    "hot path and its agreements": (
        *_HOT_PATH,
        "units/gatherer.py",
        "units/passes.py",
        "partition/gradient_buckets.py",
        "domain/agreement.py",
    ),
    "kernels": ("kernels/*.py",),
}
_NO_CODE = frozenset(getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"))


def lines_of_code(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that nothing is done with: a docstring.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


class Size(NamedTuple):
    files: int
    code: int  # lines


def sizes_of_groups() -> dict[str, Size]:
    found = {}
    for name, patterns in GROUPS.items():
        files = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
        found[name] = Size(len(files), sum(lines_of_code(path.read_text()) for path in files))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="by file too")
    parser.add_argument("--write", action="store_true", help=f"write the groups to {TABLE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    groups = sizes_of_groups()
    if arguments.write:
        TABLE.write_text(json.dumps({name: size._asdict() for name, size in groups.items()}, indent=2) + "\n")
        return
    folders: Counter[Path] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        count = lines_of_code(path.read_text())
        folders[path.parent] += count
        if arguments.files:
            print(f"{count:6} {path.relative_to(ROOT)}")
    for folder, count in sorted(folders.items()):
        print(f"{count:6} {folder.relative_to(ROOT)}/")
    for name, size in groups.items():
        print(f"{size.code:6} {name}, {size.files} files")
    print(f"{folders.total():6} in all")


if __name__ == "__main__":
    main()
