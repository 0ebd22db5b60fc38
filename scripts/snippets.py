"""Check the types of the package, of tests/typed_calls.py, and of every block of Python in README.md and docs/.

python scripts/snippets.py             with mypy --strict, as scripts/check.sh does
python scripts/snippets.py pyright     with pyright, which must be on the PATH: the blocks and calls alone

The exit code is the checker's, whose lines name a page and the line there: pages/README.py:68 is line 68 of
README.md.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = ROOT / "tests" / "typed_calls.py"
PYRIGHT = '{{"extraPaths": ["{root}"], "pythonVersion": "3.11", "reportPrivateImportUsage": false}}'


def blocks() -> Iterator[tuple[str, str]]:
    """Pairs of a file's name and its text: one for each block, with as many empty lines before as the page has."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        for number, found in enumerate(re.finditer(r"```python\n(.*?)```", text, re.DOTALL)):
            if "import" in found[1]:  # a piece of a file of ours has none
                name = page.stem.replace("-", "_") + f"_{number}" * bool(number)
                yield f"{name}.py", "\n" * text.count("\n", 0, found.start(1)) + found[1]


def check(checker: str, folder: Path) -> int:
    """Writes the blocks into a package ``pages``, of which pyproject.toml has settings, and runs the checker there."""
    pages = folder / "pages"
    pages.mkdir()
    for name, text in (("__init__.py", ""), *blocks(), (CALLS.name, CALLS.read_text())):
        (pages / name).write_text(text)
    if checker == "mypy":
        # One run for all, as reading torch takes it most of its time.
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), str(ROOT / "shardopt"), "pages"]
    else:
        (folder / "pyrightconfig.json").write_text(PYRIGHT.format(root=ROOT))
        command = ["pyright", "--pythonpath", sys.executable]
    return subprocess.run(command, cwd=folder).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checker", nargs="?", choices=("mypy", "pyright"), default="mypy", help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check(options.checker, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
