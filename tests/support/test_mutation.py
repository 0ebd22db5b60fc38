"""Mutants (``tests/mutation/``): each is one change in one place, of what steers the code; a seed draws the same.

Features that a script takes away are still where it looks for them.
"""

import ast
import textwrap
from typing import Any

from tests.mutation import waits
from tests.mutation.features import FEATURES
from tests.mutation.mutants import Mutant, draw, mutants_of
from tests.support.paths import ROOT

SOURCE = textwrap.dedent(
    '''\
    """Texts stay: 1 < 2."""
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        LIMIT = 3

    @cache
    def first(items: list[int] = 4, flag: "x < 5" = True) -> int:
        """Stays too."""
        assert items, f"not {1 + 1}"
        if flag and not items[1:]:
            raise ValueError("too few" + str(2 + 2))
        elif rank == 0 or flag is None:
            work.wait()
        items.append(
            torch.float32,
        )
        for index in range(len(items)):
            total += index * self.rank
        return (
            total
            < index
        )

    class Box:
        def __repr__(self):
            return str(1 + 2)
    '''
)
AFTER = [
    'def first(items: list[int] = 4, flag: "x < 5" = False) -> int:',
    'def first(items: list[int] = 5, flag: "x < 5" = True) -> int:',
    "if flag or not items[1:]:",
    "if flag and not items[2:]:",
    "if flag and not items[1 + 1:]:",
    "if not (flag and not items[1:]):",
    "elif rank == 0 and flag is None:",
    "elif rank != 0 or flag is None:",
    "elif rank == 0 or flag is not None:",
    "elif rank == 1 or flag is None:",
    "elif 0 == 0 or flag is None:",
    "elif abs(rank - 1) == 0 or flag is None:",
    "elif not (rank == 0 or flag is None):",
    "pass",
    "pass",
    "torch.bfloat16,",
    "for index in range(len(items) + 1):",
    "total += index / self.rank",
    "total -= index * self.rank",
    "total += index * 0",
    "total += index * abs(self.rank - 1)",
    "None",
    "<= index",
]


def test_each_mutant_is_one_change() -> None:
    mutants = mutants_of("a/b.py", SOURCE)
    assert [each.after.strip() for each in mutants] == AFTER
    trees = {ast.dump(ast.parse(each.apply(SOURCE))) for each in mutants}
    assert len(trees) == len(AFTER) and ast.dump(ast.parse(SOURCE)) not in trees
    assert [each.kind for each in mutants if each.after.strip() == "pass"] == ["dropped wait", "dropped call"]
    assert all(each.is_cached for each in mutants)
    assert {(each.first, each.last) for each in mutants if each.line == 22} == {(20, 23)}


def test_lines_that_moved_are_found_again() -> None:
    for each in mutants_of("a/b.py", SOURCE):
        moved = each.moved_to("# one\n# two\n" + SOURCE)
        assert moved is not None and (moved.line, moved.first) == (each.line + 2, each.first + 2)
        assert moved.apply("# one\n# two\n" + SOURCE) == "# one\n# two\n" + each.apply(SOURCE)
        assert each.moved_to("x = 1\n") is None


def test_a_seed_draws_the_same_from_each_folder() -> None:
    everything = [each for file in ("a/b.py", "a/c/d.py", "a/c/e.py") for each in mutants_of(file, SOURCE)]
    drawn = draw(everything, 5, 12)
    assert drawn == draw(iter(everything), 5, 12) and drawn != draw(everything, 6, 12)
    assert len({(each.file, each.line) for each in drawn}) == 12
    folders = [each.file.rpartition("/")[0] for each in drawn]
    assert folders.count("a") == 4 and folders.count("a/c") == 8
    assert len({each.kind for each in drawn}) > 5 and all(isinstance(each, Mutant) for each in drawn)


def test_features_are_where_they_were() -> None:
    for feature in FEATURES:
        assert feature.removed_from((ROOT / feature.file).read_text())
        for test in feature.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_the_page_of_waits_is_as_it_is_written() -> None:
    """Three cells a row, each in one line, and a heading that counts them: no row is written by hand."""
    page = waits.RESULTS.read_text()
    assert waits.table(waits.rows(page)) == page
    site = waits.Site("offload.host", "HostStorage.write", 0, "wait()")
    scenario: Any = "stage 1"
    broken = waits.row(site, (scenario, "KeyError: tensor([1 |\n      2])"))
    assert broken[1:] == ("stage 1", "KeyError: tensor([1 / 2])")
    assert waits.rows(waits.table([broken, waits.row(site, None)])) == [broken, waits.row(site, None)]
