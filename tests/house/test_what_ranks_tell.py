"""Promise: docs/what-ranks-tell.md names every function that exchanges something with other ranks, and no other one.

A call counts by its name: those of groups of ranks, agreements, checkpoints, torch.distributed, boards, roll calls and
sockets. A new mechanism gets a name here.
"""

import ast
import re
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.told_pages import NAMED, PACKAGE, check_names, functions_in

PAGE = ROOT / "docs" / "what-ranks-tell.md"
SAYS = re.compile(
    r"(?:^|\.)(?:exchange|begin_exchange|exchange_json|exchange_rows|exchange_slices|all_reduce|broadcast|barrier|send_bytes"
    r"|agree|agreed|agree_on|agree_on_call|agree_on_whole|raising_together|announce|announce_error"
    r"|together|raise_together|compare_parts|all_gather_records|gather_by_holder)$"
    r"|collectives\.(?:compare|all_gather|reduce_scatter|all_to_all)$|(?:world|shard)\.gather$|(?:_board|_marks|_roll_call)\.\w+$"
    r"|^self\._ranks\.begin$|^dist\.(?:all_to_all|irecv|isend)$"
)
# By file: calls that say something there and nothing elsewhere.
SAYS_HERE = {
    "checkpoint/write.py": re.compile(r"^self\._(?:leave|wait)$"),
    "partition/comm/group.py": re.compile(r"^self\.(?:begin|_finish)$"),
    "partition/comm/roll_call.py": re.compile(r"^end_waits$"),
}


# Errors of threads, which their own thread's caller raises; two of collectives that other ranks' writes depend on; and
# that of a rank apart, which ends its other gathers first.
KEEPING = {
    "checkpoint/background.py",
    "domain/sharded_params.py",
    "module/round_gradients.py",
    "offload/disk/pipeline.py",
    "partition/comm/all_gather.py",
    "partition/comm/together.py",
}


def dotted(function: ast.AST) -> str:
    """``a.b.c`` of what is called; ``?.c`` of what another call returned."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else "?"


def exchanging(path: Path) -> set[tuple[str, str]]:
    """(file, function) of each function that exchanges something: itself, or one that is written within it."""
    name, nodes = path.relative_to(PACKAGE).as_posix(), functions_in(path)
    found = set()
    for function, node in nodes.items():
        above = function.rpartition(".")[0]
        if isinstance(node, ast.FunctionDef) and not isinstance(nodes.get(above), ast.FunctionDef):
            calls = (dotted(each.func) for each in ast.walk(node) if isinstance(each, ast.Call))
            if any(SAYS.search(call) or (name in SAYS_HERE and SAYS_HERE[name].search(call)) for call in calls):
                found.add((name, function))
    return found


def named_in_tables() -> set[tuple[str, str]]:
    """What the last column of each row names: a file, then functions of it."""
    found = set()
    for line in PAGE.read_text().splitlines():
        if line.startswith("| "):
            found |= set(NAMED.findall(line.removesuffix(" |").rpartition(" | ")[2]))
    return found


def test_every_function_that_exchanges_something_has_a_row() -> None:
    there = {each for path in PACKAGE.rglob("*.py") for each in exchanging(path)}
    told = named_in_tables()
    assert not there - told, f"these tell other ranks something, and no row of {PAGE.name} says so: {there - told}"
    assert not told - there, f"rows of {PAGE.name} name these, which exchange nothing: {told - there}"


def test_all_that_is_named_is_there() -> None:
    check_names(PAGE)


def errors_kept_by_hand(tree: ast.AST) -> bool:
    """True if a handler of an error keeps it in a variable (``problem = error``) for a later exchange."""
    return any(
        isinstance(kept, ast.Assign) and isinstance(kept.value, ast.Name) and kept.value.id == handler.name
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler)
        for kept in handler.body
    )


def test_errors_wait_for_an_exchange_in_one_way() -> None:
    """``partition/comm/together.py`` keeps them."""
    assert errors_kept_by_hand(ast.parse("try:\n    work()\nexcept Exception as error:\n    problem = error"))
    assert not errors_kept_by_hand(ast.parse("try:\n    work()\nexcept Exception as error:\n    relay.note(error)"))
    keeping = [path for path in PACKAGE.rglob("*.py") if errors_kept_by_hand(ast.parse(path.read_text()))]
    found = {path.relative_to(PACKAGE).as_posix() for path in keeping}
    assert found == KEEPING, found ^ KEEPING
