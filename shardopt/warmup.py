"""The learning rate schedules that DeepSpeed configs name, as torch schedulers.

Step 0 runs at the lowest rate, and step k + 1 at the curve's value at k: that is how many scripts were tuned, so it is
kept.
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
        if self.steps < 0:
            raise ValueError(f"warmup_num_steps must not be negative, found {self.steps!r}.")

    @property
    def end(self) -> int:
        return max(2, self.steps)

    def at(self, step: int) -> float:
        return math.log(1 + step) / math.log(self.end) if self.shape == "log" else step / self.end


@dataclass(frozen=True)
class WarmupLR:
    """min + (max - min) * warmup, then ``max`` for ever, or falling in a line to 0 at ``total``.

    Attributes:
        highest: None: the group's own rate.
    """

    warmup: Warmup
    lowest: float = 0.0
    highest: float | None = 0.001
    total: int | None = None

    def __call__(self, step: int, base: float) -> float:
        highest = base if self.highest is None else self.highest
        return self.lowest + (highest - self.lowest) * self._share(step)

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


@dataclass(frozen=True)
class RangeTestLR:
    """lowest * (1 + rate * steps / interval), to see which rate a training bears; in ``stairs``, of whole intervals."""

    lowest: float = 0.001
    interval: int = 2000
    rate: float = 1.0
    stairs: bool = False

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"lr_range_test_step_size must be at least 1, found {self.interval!r}.")

    def __call__(self, step: int, base: float) -> float:
        passed = (step + 1) / self.interval
        return self.lowest * (1 + self.rate * (math.floor(passed) if self.stairs else passed))


@dataclass(frozen=True)
class Cycle:
    """How far a cycle has come: 0 to 1 in ``up`` steps, back to 0 in ``down``; and how far it is behind.

    Attributes:
        decay_interval: steps of the unit in which what comes behind the cycle is counted; 0: nothing changes there.
    """

    up: int = 2000
    down: int = 2000
    decay_interval: int = 0

    def __post_init__(self) -> None:
        if self.up < 1 or self.down < 1:
            raise ValueError(f"the step sizes of a cycle must be at least 1, found {self.up!r} and {self.down!r}.")

    def share(self, step: int) -> float:
        taken = (step + 1) % (self.up + self.down)
        return taken / self.up if taken <= self.up else (self.up + self.down - taken) / self.down

    def is_over(self, step: int) -> bool:
        return step >= self.up + self.down

    def passed(self, step: int) -> float:
        return (step + 1 - self.up - self.down) / self.decay_interval if self.decay_interval else 0.0


@dataclass(frozen=True)
class OneCycleLR:
    """min + (max - min) * cycle, then min / (1 + decay * intervals); Smith, arXiv 1803.09820.

    Attributes:
        momentum: (least, largest, decay) of ``betas[0]``, the other way: largest - (largest - least) * cycle,
            then largest * (1 + decay * intervals); None: it stays what it is.
    """

    cycle: Cycle
    lowest: float
    highest: float
    decay: float = 0.0
    momentum: tuple[float, float, float] | None = None

    def __call__(self, step: int, base: float) -> float:
        if self.cycle.is_over(step):
            return self.lowest / (1 + self.decay * self.cycle.passed(step))
        return self.lowest + (self.highest - self.lowest) * self.cycle.share(step)

    def betas(self, step: int) -> tuple[float, float] | None:
        """Of every group. The second one is 0.99 there as soon as the first is cycled, so it is here."""
        if self.momentum is None:
            return None
        least, largest, decay = self.momentum
        if step < 0:
            return least, 0.99
        if self.cycle.is_over(step):
            return largest * (1 + decay * self.cycle.passed(step)), 0.99
        return largest - (largest - least) * self.cycle.share(step), 0.99


Curve = Callable[[int, float], float]


class CurveLR(LRScheduler):
    """Sets every group's rate to ``curve(steps taken - 1, the rate that the group began with)``, and its betas where
    the curve has some."""

    def __init__(self, optimizer: Optimizer, curve: Curve, last_epoch: int = -1):
        self.curve = curve
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        betas = self.curve.betas(self.last_epoch - 1) if isinstance(self.curve, OneCycleLR) else None
        for group in self.optimizer.param_groups if betas is not None else ():
            group["betas"] = betas
        return [self.curve(self.last_epoch - 1, float(base)) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Without the curve, which the config gives again."""
        return {name: value for name, value in super().state_dict().items() if name != "curve"}
