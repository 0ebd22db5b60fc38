"""The learning rate schedules that DeepSpeed configs name, as torch schedulers.

Of all three, step 0 runs at the lowest rate, and step k + 1 at the curve's value at k: that is how many scripts were
tuned, so it is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class Warmup:
    """From 0 at step 0 to 1 at ``steps``.

    Attributes:
        steps: at least 2; of fewer, 2 are made.
        shape: ``"log"``: log(1 + k) / log(steps); ``"linear"``: k / steps.
    """

    steps: int = 1000
    shape: Literal["log", "linear"] = "log"

    def __post_init__(self) -> None:
        if self.shape not in ("log", "linear"):
            raise ValueError(f"warmup_type must be 'log' or 'linear', found {self.shape!r}.")
        if self.steps < 1:
            raise ValueError(f"warmup_num_steps must be at least 1, found {self.steps!r}.")

    @property
    def end(self) -> int:
        return max(2, self.steps)

    def at(self, step: int) -> float:
        return math.log(1 + step) / math.log(self.end) if self.shape == "log" else step / self.end


@dataclass(frozen=True)
class WarmupLR:
    """min + (max - min) * warmup, then ``max`` for ever, or falling in a line to 0 at ``total``."""

    warmup: Warmup
    lowest: float = 0.0
    highest: float = 0.001
    total: int | None = None

    def __call__(self, step: int, base: float) -> float:
        return self.lowest + (self.highest - self.lowest) * self._share(step)

    def _share(self, step: int) -> float:
        if step < 0:
            return 0.0
        if step < self.warmup.end:
            return self.warmup.at(step)
        if self.total is None:
            return 1.0
        return max(0.0, (self.total - step) / max(1.0, self.total - self.warmup.end))


@dataclass(frozen=True)
class WarmupCosineLR:
    """The group's own rate times a share: a warmup from ``first``, then half a cosine down to ``last`` at ``total``."""

    warmup: Warmup
    total: int
    first: float = 0.0
    last: float = 0.0001

    def __call__(self, step: int, base: float) -> float:
        if step < 0:
            return 0.0
        if step < self.warmup.end:
            return base * (self.first + (1 - self.first) * self.warmup.at(step))
        passed = min(1.0, (step - self.warmup.end + 1) / max(1, self.total - self.warmup.end))
        return base * max(0.0, self.last + (1 - self.last) * (1 + math.cos(math.pi * passed)) / 2)


Curve = Callable[[int, float], float]


class CurveLR(LRScheduler):
    """Sets every group's rate to ``curve(steps taken - 1, the rate that the group began with)``."""

    def __init__(self, optimizer: Optimizer, curve: Curve, last_epoch: int = -1):
        self.curve = curve
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        return [self.curve(self.last_epoch - 1, float(base)) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Without the curve, which the config gives again."""
        return {name: value for name, value in super().state_dict().items() if name != "curve"}
