"""The updates that params have taken."""

from __future__ import annotations

from collections.abc import Mapping


class History:
    """A step count, and what the rule carries to the next step; shared by params that took the same updates.

    A step evaluates scalars once for all params of a history, and counts once for all of them. Params part when one of
    them is updated without the others: the step's plan then gives those that are updated a history of their own.

    Attributes:
        step: updates so far. It is an int: a float counter stops counting (bf16 at 256, fp32 at 2**24).
        carried: scalars that the rule passes from step to step.
    """

    __slots__ = ("carried", "step")

    def __init__(self, step: int = 0, carried: Mapping[str, float] | None = None):
        self.step = step
        self.carried = dict(carried or {})

    def advance(self, carried: dict[str, float]) -> None:
        """Counts an update."""
        self.step, self.carried = self.step + 1, carried
