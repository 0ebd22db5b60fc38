"""The draw of grids: all pairs meet, rows that are not allowed never come, and the draw is the same in every run."""

import itertools

from tests.support.sweep import drawn, grid

AXES = {"stage": (0, 1, 2, 3), "world": (1, 2, 3), "tier": (None, "cpu", "disk"), "fused": (False, True)}


def allowed(stage: int, world: int, tier: str | None, fused: bool) -> bool:
    return not (stage == 0 and tier == "disk")


def test_all_allowed_pairs_meet_in_few_rows() -> None:
    rows = drawn(AXES, allowed=allowed)
    met = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    everything = {pair for row in grid(AXES, allowed) for pair in itertools.combinations(enumerate(row), 2)}
    assert met == everything
    assert len(rows) <= 14 < len(grid(AXES, allowed)) == 66
    assert rows == drawn(AXES, allowed=allowed)


def test_each_value_comes_once_at_strength_1() -> None:
    rows = drawn(AXES, strength=1)
    assert len(rows) == 4 and all(
        {row[axis] for row in rows} == set(values) for axis, values in enumerate(AXES.values())
    )
