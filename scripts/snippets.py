"""Check the types of every block of Python in README.md and docs/, as an editor does.

python scripts/snippets.py             with mypy --strict
python scripts/snippets.py pyright     with pyright, which must be on the PATH

--and FILE checks a file too. The exit code is the checker's, whose lines name a page and the line there: README.py:68
is line 68 of README.md.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Two errors are not the block's: torch.distributed does not mark all of its public names as exported, and some
# libraries are not typed. shardopt's own files have settings of their own, in pyproject.toml.
MYPY = """[mypy]
strict = true
mypy_path = {root}
untyped_calls_exclude = torch

[mypy-shardopt.*]
ignore_errors = true

[mypy-torch.*]
implicit_reexport = true

[mypy-accelerate.*,triton.*,numba.*,llvmlite.*]
ignore_missing_imports = true
follow_imports = skip
"""
PYRIGHT = '{{"extraPaths": ["{root}"], "pythonVersion": "3.11", "reportPrivateImportUsage": false}}'


def blocks() -> Iterator[tuple[str, str]]:
    """Pairs of a file's name and its text: one for each block, with as many empty lines before as the page has."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        for number, found in enumerate(re.finditer(r"```python\n(.*?)```", text, re.DOTALL)):
            if "import" in found[1]:  # a piece of a file of ours has none
                name = page.stem.replace("-", "_") + f"_{number}" * bool(number)
                yield f"{name}.py", "\n" * text.count("\n", 0, found.start(1)) + found[1]


def check(checker: str, more: Sequence[Path], folder: Path, cache: Path) -> int:
    """Writes the blocks and the checker's settings into a folder, and runs it there."""
    names = []
    for name, text in (*blocks(), *((path.name, path.read_text()) for path in more)):
        (folder / name).write_text(text)
        names.append(name)
    if checker == "mypy":
        (folder / "mypy.ini").write_text(MYPY.format(root=ROOT))
        command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(cache), *names]
    else:
        (folder / "pyrightconfig.json").write_text(PYRIGHT.format(root=ROOT))
        command = ["pyright", "--pythonpath", sys.executable]
    return subprocess.run(command, cwd=folder).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checker", nargs="?", choices=("mypy", "pyright"), default="mypy", help="default: %(default)s")
    parser.add_argument("--and", dest="more", metavar="FILE", type=Path, action="append", default=[])
    parser.add_argument("--cache", type=Path, default=ROOT / ".mypy_cache" / "snippets", help="mypy's cache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check(options.checker, options.more, Path(folder), options.cache.resolve())


if __name__ == "__main__":
    sys.exit(main())
