"""Counts lines of code in the package: without docstrings, comments and blank lines.

python scripts/count_code.py            by folder, and in all
python scripts/count_code.py --files    by file too
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="by file too")
    by_file = parser.parse_args().files
    folders: Counter[Path] = Counter()
    for path in sorted((ROOT / "shardopt").rglob("*.py")):
        count = lines_of_code(path.read_text())
        folders[path.parent] += count
        if by_file:
            print(f"{count:6} {path.relative_to(ROOT)}")
    for folder, count in sorted(folders.items()):
        print(f"{count:6} {folder.relative_to(ROOT)}/")
    print(f"{folders.total():6} in all")


if __name__ == "__main__":
    main()
