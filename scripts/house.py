"""Draw the house: which folder of the package imports which, read from the imports themselves.

    python scripts/house.py            print the picture
    python scripts/house.py --write    write it to docs/house.md
    python scripts/house.py --check    exit with 1 if docs/house.md shows another house

In the picture every import counts, also those inside of functions and under TYPE_CHECKING: a reader follows them all.
The longest chain counts what Python loads when a module is imported.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "shardopt"
PICTURE = ROOT / "docs" / "house.md"

# From the roof to the cellar. A folder imports from lower floors only, so the four that never mix share one floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__", "plan"),
    ("tools",),
    ("integrations",),
    ("checkpoint",),
    ("optim",),
    ("calls",),
    ("engine",),
    ("bindings",),
    ("step",),
    ("module", "states", "activations"),
    ("domain",),
    ("remote", "units"),
    ("partition",),
    ("tensors", "kernels", "rules", "offload"),
    ("config",),
    ("option", "compilers"),
    ("arguments",),
    ("errors", "version", "beginning", "gpu_stream", "huge_pages", "machine", "profiler", "uncompiled"),
)
# The public names, which Python loads first: what they import is the roof's to choose.
FACE = "__init__"

HEAD = """# The house

Made by `python scripts/house.py --write` from the imports of the package; `tests/house` compares. Arrows point
down only: a folder imports from the floors below it, and no module is part of a circle. The numbers count imports
between modules.
"""


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == FACE else parts)] = path
    return found


def imports_of(name: str, path: Path, known: Mapping[str, Path], loaded: bool) -> Iterator[str]:
    """The dotted names that a module imports: all of them, or those that are loaded with it."""
    package = name.split(".") if path.stem == FACE else name.split(".")[:-1]
    tree = ast.parse(path.read_text())
    for node in tree.body if loaded else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{target}.{alias.name}"
                yield full if full in known else target
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def graph(loaded: bool = False) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports: all of them, or those that are ``loaded`` with it."""
    known = modules()
    return {
        name: {each for each in imports_of(name, path, known, loaded) if each in known and each != name}
        for name, path in known.items()
    }


def room(module: str) -> str:
    """The folder of a module, or the file at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def floor_of(name: str) -> int:
    """Number of a room's floor, 0 for the roof."""
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def upward(found: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports between two rooms that do not lead to a lower floor."""
    wrong = []
    for name, targets in sorted(found.items()):
        for target in sorted(targets):
            here, there = room(name), room(target)
            if here in (FACE, there) or (there == FACE and floor_of(here) <= 1):
                continue
            if there == FACE or floor_of(there) <= floor_of(here):
                wrong.append((name, target))
    return wrong


def circles(found: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other: the strongly connected components (Tarjan, 1972) of several modules."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(found[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(found):
        if name not in index:
            visit(name)
    return groups


def longest_chain(found: Mapping[str, set[str]]) -> list[str]:
    """The longest chain of imports. There must be no circle."""
    best: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in best:
            best[name] = [name, *max((chain(each) for each in sorted(found[name])), key=len, default=[])]
        return best[name]

    return max((chain(name) for name in sorted(found)), key=len)


def question(name: str) -> str:
    """The first line of the docstring of a folder or file at the top."""
    folder = ROOT / PACKAGE / name
    path = folder / f"{FACE}.py" if folder.is_dir() else folder.with_suffix(".py")
    line = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    return re.sub(r":mod:`([^`]+)`", r"``\1``", line)


def picture(found: Mapping[str, set[str]]) -> str:
    """The house as Markdown: a table of floors, and arrows between rooms."""
    arrows = Counter((room(name), room(target)) for name, targets in found.items() for target in targets)
    lines = [HEAD, "| floor | room | files | its question | imports from |", "|---|---|---|---|---|"]
    files = Counter(map(room, found))
    for number, rooms in enumerate(FLOORS):
        for each in rooms:
            down = [f"{there} {count}" for (here, there), count in sorted(arrows.items()) if here == each != there]
            lines.append(
                f"| {len(FLOORS) - 1 - number} | `{each}` | {files[each]} | {question(each)} | {', '.join(down)} |"
            )
    lines += ["", "```mermaid", "flowchart TD"]
    shown = [each for rooms in FLOORS for each in rooms if each not in ("__main__", "plan", "version", "option")]
    for (here, there), count in sorted(arrows.items()):
        if here != there and here in shown and there in shown and there not in ("errors", "config", "arguments"):
            lines.append(f"    {here} -->|{count}| {there}")
    return "\n".join([*lines, "```", ""])


def main() -> int:
    """Draws, writes or compares."""
    parser = argparse.ArgumentParser(description="Draw the house: which folder imports which.")
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if {PICTURE.relative_to(ROOT)} differs")
    arguments = parser.parse_args()
    found = graph()
    drawn = picture(found)
    if arguments.write:
        PICTURE.write_text(drawn)
    elif arguments.check:
        return int(not PICTURE.exists() or PICTURE.read_text() != drawn)
    else:
        print(drawn)
        chain = longest_chain(graph(loaded=True))
        print(f"longest chain of imports: {len(chain)}\n  " + "\n  ".join(chain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
