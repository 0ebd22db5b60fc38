"""Takes the order of streams away, one call at a time: every wait, join, mark and record of the package.

    python -m tests.mutation.waits [WORDS ...]     writes results/waits.md; with words anew only the sites that hold one

A site is one of three: a call that stands alone and orders something (``buffer.join()``), which goes; a mark that a
copy or a slot is given (``to_host(copies, self._streams.now())``), which becomes one that was never recorded; a mark
that is kept (``slot.mark = ...``), which stays what it was. Scenarios run until one of them has a race.
"""

import ast
import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.mutation.waits_unseen import UNSEEN
from tests.support.paths import ROOT
from tests.support.streams.scenarios import Scenario, scenarios

NOT_FOUND = "**not found**"
RESULTS = Path(__file__).parent / "results" / "waits.md"
MODULES = (
    *(f"partition.{name}" for name in ("streams", "reducer", "gradient_buckets")),
    *(
        f"partition.comm.{name}"
        for name in ("all_gather", "async_gather", "reduce_scatter_collective", "transport", "group")
    ),
    *(f"offload.{name}" for name in ("streams", "ring", "cpu_step", "gradients", "host", "near")),
    *(
        "units.gatherer",
        "units.gathered",
        "domain.overlapped_gather",
        "module.overlap_hooks",
        "domain.host_sum",
        "domain.remote_states",
        "domain.remote_gradients",
        "tensors.gradient_slice",
        "module.round_gradients",
        "module.rounds",
        "step.update",
        "step.early",
    ),
)
_CALLS = {
    *(
        "mark",
        "join",
        "occupy",
        "_join_on",
        "_record",
        "wait",
        "wait_on_stream",
        "wait_event",
        "synchronize",
        "record",
        "last_used",
        "wait_loaded",
        "wait_for_copies",
    ),
    *(
        "flush",
        "finish",
        "end",
        "wait_for",
        "_wait",
        "_wait_for_copies",
        "_drop_staged",
        "wait_if_alive",
        "method",
    ),
}
_TAKERS = {"to_device": 1, "to_host": 1, "_copy": 2, "Slot": 1, "_Slot": 1}  # call -> which argument is a mark
_KEPT = {"mark", "_stored", "_read", "_sent", "_to_device", "_to_host", "_gradients_made", "_written"}


@dataclass(frozen=True)
class Site:
    """One call, argument or target."""

    module: str
    function: str  # by qualified name
    number: int  # of the site in its function
    text: str

    def __str__(self) -> str:
        return f"`{self.module}`, `{self.function}`: `{self.text}`"


class _Finder(ast.NodeTransformer):
    """Lists the sites of one function, or takes away the one of a number."""

    def __init__(self, taken: int | None = None):
        self._taken, self.found = taken, []  # type: ignore[var-annotated]

    def _is_taken(self, text: str) -> bool:
        self.found.append(text)
        return len(self.found) - 1 == self._taken

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and _name(call.func) in _CALLS and self._is_taken(ast.unparse(call)):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        index = _TAKERS.get(_name(node.func))
        if index is not None and len(node.args) > index and self._is_taken(_given(node, index)):
            never = ast.parse("torch.cuda.Event()", mode="eval").body
            node.args[index] = ast.copy_location(never, node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        targets = []
        for each in node.targets:
            is_mark = _name(each) in _KEPT and ast.unparse(node.value) not in ("None", "torch.cuda.Event()")
            if not (is_mark and self._is_taken(f"{ast.unparse(each)} = {ast.unparse(node.value)}")):
                targets.append(each)
        return node if targets == node.targets else _assigned(targets, node)


def _assigned(targets: list[ast.expr], node: ast.Assign) -> ast.stmt:
    made = ast.Assign(targets=targets, value=node.value) if targets else ast.Expr(node.value)
    return ast.fix_missing_locations(ast.copy_location(made, node))


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _given(node: ast.Call, index: int) -> str:
    return f"{ast.unparse(node.func)}(..., after {ast.unparse(node.args[index])})"


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions and methods of a module, by qualified name; one within another belongs to that."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / "shardopt" / (module.replace(".", "/") + ".py")).read_text())


@functools.cache
def sites() -> tuple[Site, ...]:
    """All of them, in the order of the text."""
    found: list[Site] = []
    for module in MODULES:
        for name, node in _functions(_tree(module)):
            finder = _Finder()
            finder.visit(node)
            found += [Site(module, name, number, text) for number, text in enumerate(finder.found)]
    return tuple(found)


@contextmanager
def without(site: Site) -> Iterator[None]:
    """Within, the package runs without this call, argument or target."""
    module = importlib.import_module(f"shardopt.{site.module}")
    tree = _tree(site.module)
    node = dict(_functions(tree))[site.function]
    _Finder(site.number).visit(node)
    file = str(module.__file__)
    changed = _code(compile(ast.fix_missing_locations(tree), file, "exec"), site.function.split("."))
    function = _function(module, site.function)
    before, function.__code__ = function.__code__, changed
    try:
        yield
    finally:
        function.__code__ = before


def _code(code: CodeType, path: Sequence[str]) -> CodeType:
    for name in path:
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    return code


def _function(module: Any, name: str) -> FunctionType:
    found: Any = module
    for each in name.split("."):
        found = inspect.getattr_static(found, each)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    assert isinstance(found, FunctionType), name
    return found


def found_by(site: Site, among: Sequence[Scenario]) -> tuple[Scenario, str] | None:
    """The first scenario that notices, and what it finds."""
    for each in among:
        try:
            with without(site):
                races = each.run(steps=2).races
        except Exception as error:
            return each, f"{type(error).__name__}: {error}"
        if races:
            return each, races[0]
    return None


# What a site can be noticed by, by words of its module and of the scenario; others are of no use to it.
_USE = {
    "ring": ("ring",),
    "offload.host": ("ring", "moved"),
    "offload.near": ("ring", "CPU step"),
    "cpu_step": ("CPU step",),
    "offload.streams": ("ring", "CPU step"),
    "offload.gradients": ("at rest",),
    "host_sum": ("at rest",),
    "remote_states": ("served",),
    "remote_gradients": ("asked",),
    "async_gather": ("arrive",),
    "overlapped_gather": ("arrive",),
    "overlap_hooks": ("arrive",),
    "step.update": ("stage 1, memory", "at rest"),
    "partition.reduce": ("memory", "at rest"),
}


def of_use(site: Site, among: Sequence[Scenario]) -> list[Scenario]:
    words = next((words for part, words in _USE.items() if part in site.module), ("memory",))
    return [each for each in among if any(word in str(each) for word in words)]


Row = tuple[str, str, str]  # site, scenario, what it noticed


def row(site: Site, found: tuple[Scenario, str] | None) -> Row:
    """The row of a site: texts in one line each, without the mark that ends a cell."""
    if found is None:
        return str(site), "-", f"{NOT_FOUND}: {UNSEEN.get(str(site), '?')}"
    return str(site), str(found[0]), " ".join(found[1].replace("|", "/").split())[:160].strip()


def rows(page: str) -> list[Row]:
    """The rows that a page has."""
    cells = (line.removeprefix("| ").removesuffix(" |").split(" | ") for line in page.splitlines()[6:])
    return [(site, scenario, what) for site, scenario, what in cells]


def by_site(results: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each site: several may be spelled alike."""
    found: dict[str, list[Row]] = {}
    for each in results:
        found.setdefault(each[0], []).append(each)
    return found


def table(results: Sequence[Row]) -> str:
    """Markdown."""
    counts = Counter("not found" if what.startswith(NOT_FOUND) else "found" for _, _, what in results)
    lines = [
        "# The order of streams, one call taken away at a time",
        "",
        f"`python -m tests.mutation.waits` wrote this: {len(results)} sites, {counts['found']} found, "
        f"{counts['not found']} not found. Each of these says why.",
        "",
        "| site | noticed by | as |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {site} | {scenario} | {what} |" for site, scenario, what in results), ""])


def main() -> None:
    importlib.import_module("tests.support.preload")
    words = sys.argv[1:]
    known, every = by_site(rows(RESULTS.read_text()) if words else ()), sites()
    chosen = [each for each in every if str(each) not in known or any(word in str(each) for word in words)]
    for site in chosen:
        known[str(site)] = []
    everything, last = scenarios(), {}  # type: ignore[var-annotated]
    for site in chosen:
        # What noticed the last site of this module is asked first.
        first = last.get(site.module, [])
        found = found_by(site, [*first, *(each for each in of_use(site, everything) if each not in first)])
        if found is not None:
            last[site.module] = [found[0], *(each for each in first if each is not found[0])]
        known[str(site)].append(row(site, found))
        print(site, "->", "NOT FOUND" if found is None else f"{found[0]}: {found[1]}", flush=True)
    RESULTS.write_text(table([known[str(each)].pop(0) for each in every]))  # without those of sites that are gone


if __name__ == "__main__":
    main()
