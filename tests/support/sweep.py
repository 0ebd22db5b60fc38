"""Grids of settings: a few rows of them in the default run, all rows with ``--slow``.

::

    AXES = {"stage": (0, 1, 2, 3), "world": (1, 2, 3), "tier": (None, "cpu", "disk")}

    @sweep(AXES)                           # every two values of two axes meet: 12 of 36 rows; the rest is slow
    def test_same_bits(stage, world, tier): ...

    @sweep(AXES, strength=1)               # every value comes once: 4 of 36
    def test_refusals(stage, world, tier): ...

    @sweep_at_once(AXES)                   # one test that gets the 12 rows as a list, and a slow one that gets all 36
    def test_many_in_one_job(rows): ...

Almost every defect of a combination needs two values to meet, not three (Kuhn, Wallace and Gallo, IEEE TSE 30(6),
2004).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]
Allowed = Callable[..., bool]


def drawn(
    axes: Mapping[str, Sequence[Any]],
    strength: int = 2,
    allowed: Allowed | None = None,
    first: Sequence[Row] = (),
) -> list[Row]:
    """Few rows of the grid in which all allowed combinations of ``strength`` values meet; the same in every run.

    Greedy: behind the rows that are given ``first`` each next one is the first of those that bring together most values
    that have not met yet.
    """
    rows = [(row, _sets(row, strength)) for row in grid(axes, allowed)]
    open_sets = {each for _, sets in rows for each in sets}.difference(*(_sets(row, strength) for row in first))
    chosen = [*first]
    while open_sets:
        row, sets = max(rows, key=lambda each: len(open_sets & each[1]))
        open_sets -= sets
        chosen.append(row)
    return chosen


def grid(axes: Mapping[str, Sequence[Any]], allowed: Allowed | None = None) -> list[Row]:
    """All rows; ``allowed(**row)`` leaves out what makes no sense."""
    rows = itertools.product(*axes.values())
    return [row for row in rows if allowed is None or allowed(**dict(zip(axes, row, strict=True)))]


def sweep(axes: Mapping[str, Sequence[Any]], strength: int = 2, allowed: Allowed | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test over the axes by name; rows that are not drawn are marked slow."""
    few = drawn(axes, strength, allowed)
    rest = [row for row in grid(axes, allowed) if row not in few]
    rows = [*map(_param, few), *(_param(row, pytest.mark.slow) for row in rest)]
    return pytest.mark.parametrize(",".join(axes), rows)


def sweep_at_once(
    axes: Mapping[str, Sequence[Any]], strength: int = 2, allowed: Allowed | None = None
) -> pytest.MarkDecorator:
    """Parametrizes a test by ``rows``: the list of those drawn; in a slow run the whole grid as well."""
    few = pytest.param(drawn(axes, strength, allowed), id="drawn")
    return pytest.mark.parametrize("rows", [few, pytest.param(grid(axes, allowed), id="all", marks=pytest.mark.slow)])


def _param(row: Row, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*row, marks=marks, id="-".join(map(_label, row)))


def _label(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_label, value))
    for name in ("__name__", "name"):
        if isinstance(getattr(value, name, None), str):
            return str(getattr(value, name))
    return str(value)


def _sets(row: Row, strength: int) -> set[frozenset[tuple[int, str]]]:
    """The combinations that a row covers, as (axis, value); values need not be hashable."""
    named: Iterable[tuple[int, str]] = enumerate(map(repr, row))
    return {frozenset(each) for each in itertools.combinations(named, min(strength, len(row)))}
