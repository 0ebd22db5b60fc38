"""The scheduler section of a DeepSpeed config: each schedule is a plain function, which one torch scheduler follows.

Step 0 runs at the lowest rate, and step k + 1 at the schedule's value at k, as in DeepSpeed: scripts were tuned so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .keys import count, flag, number, text

if TYPE_CHECKING:
    from .keys import Keys, Kind

Found = dict[str, Any]  # the section's params; each schedule takes what it knows out of them
# (steps taken - 1, the rate that a group began with) -> the group's hyper-parameters
Schedule = Callable[[int, float], dict[str, Any]]


class ScheduleLR(LambdaLR):
    """A ``LambdaLR`` whose function returns hyper-parameters, where torch's returns a factor of the rate."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule):
        functions: list[Any] = [schedule] * len(optimizer.param_groups)
        super().__init__(optimizer, functions)

    def get_lr(self) -> list[Any]:
        schedules: list[Any] = self.lr_lambdas
        rates = []
        for schedule, base, group in zip(schedules, self.base_lrs, self.optimizer.param_groups, strict=True):
            values = schedule(self.last_epoch - 1, float(base))
            rates.append(values.pop("lr"))
            group.update(values)
        return rates


def schedule_of(keys: Keys, has_betas: bool) -> Schedule | None:
    if not keys.has("scheduler"):
        return None
    kind = keys.take("scheduler.type", text, "")
    found = keys.take_all("scheduler.params", _kind_of)
    make = _SCHEDULES.get(kind)
    if make is None:
        keys.errors.append(
            f"scheduler.type={kind!r}: there are {', '.join(_SCHEDULES)}; or use one of torch's on run.optimizer"
        )
        return None
    if found.pop("last_batch_iteration", -1) != -1:
        keys.errors.append("scheduler.params.last_batch_iteration: load the state dict of the run that is resumed")
    for name in _NEEDS.get(kind, ()):
        if name not in found:
            if f"scheduler.params.{name}" not in keys.unfilled:
                keys.errors.append(f"scheduler.params.{name} is missing, which {kind} needs")
            found[name] = 1
    if kind == "OneCycle" and found.get("cycle_momentum", True) and not has_betas:
        found["cycle_momentum"] = False
        keys.warnings.append("scheduler.params.cycle_momentum (of an optimizer without betas nothing is cycled)")
    try:
        schedule = make(found)
    except ValueError as error:
        keys.errors.append(f"scheduler.params: {error}")
        return None
    keys.errors += [f"scheduler.params.{name}={value!r}: not known here" for name, value in found.items()]
    return schedule


def _kind_of(name: str) -> Kind:
    if name in ("cycle_momentum", "lr_range_test_staircase"):
        return flag
    if name == "warmup_type":
        return text
    return count if name.endswith(("_steps", "_size", "_count")) else number


def _warmup(found: Found) -> tuple[int, Callable[[int], float]]:
    """Returns its steps, at least 2, and its share: from 0 at step 0 to 1, log(1 + k) / log(steps) or k / steps."""
    end, shape = max(2, found.pop("warmup_num_steps", 1000)), found.pop("warmup_type", "log")
    if shape == "linear":
        return end, lambda step: step / end
    if shape == "log":
        return end, lambda step: math.log(1 + step) / math.log(end)
    raise ValueError(f"warmup_type must be 'log' or 'linear', found {shape!r}")


def _warmup_lr(found: Found, highest: float | None = None, total: int | None = None) -> Schedule:
    """min + (max - min) * warmup, then max for ever, or falling in a line to min at ``total``.

    Args:
        highest: where the section says nothing; None: the group's own rate.
    """
    (end, warmed), lowest = _warmup(found), found.pop("warmup_min_lr", 0.0)
    highest = found.pop("warmup_max_lr", highest)

    def share(step: int) -> float:
        if step < end:
            return warmed(step) if step >= 0 else 0.0
        return 1.0 if total is None else max(0.0, (total - step) / max(1.0, total - end))

    return lambda step, base: {"lr": lowest + ((base if highest is None else highest) - lowest) * share(step)}


def _warmup_decay(found: Found) -> Schedule:
    return _warmup_lr(found, 1e-3, found.pop("total_num_steps"))


def _cosine(found: Found) -> Schedule:
    """rate * share: a warmup from the first share, then half a cosine down to the last share at the total."""
    (end, warmed), total = _warmup(found), found.pop("total_num_steps")
    first: float = found.pop("warmup_min_ratio", 0.0)
    last: float = found.pop("cos_min_ratio", 1e-4)

    def share(step: int) -> float:
        if step < end:
            return first + (1 - first) * warmed(step) if step >= 0 else 0.0
        passed = min(1.0, (step - end + 1) / max(1, total - end))
        return max(0.0, last + (1 - last) * (1 + math.cos(math.pi * passed)) / 2)

    return lambda step, base: {"lr": base * share(step)}


def _one_cycle(found: Found) -> Schedule:
    """min + (max - min) * cycle, then min / (1 + decay * intervals); Smith, arXiv 1803.09820.

    ``betas[0]`` goes the other way: max - (max - min) * cycle, then max * (1 + decay * intervals).
    """
    up = found.pop("cycle_first_step_size", 2000)
    down = found.pop("cycle_second_step_size", up)
    if up < 1 or down < 1:
        raise ValueError(f"the step sizes of a cycle must be at least 1, found {up!r} and {down!r}")
    for stairs in ("cycle_first_stair_count", "cycle_second_stair_count"):
        if not found.get(stairs, 0):
            found.pop(stairs, None)
    interval, has_momentum = found.pop("decay_step_size", 0), found.pop("cycle_momentum", True)
    lowest, highest, decay = found.pop("cycle_min_lr"), found.pop("cycle_max_lr"), found.pop("decay_lr_rate", 0.0)
    least, largest = found.pop("cycle_min_mom", 0.8), found.pop("cycle_max_mom", 0.9)
    momentum_decay = found.pop("decay_mom_rate", 0.0)

    def rate_and_momentum(step: int) -> tuple[float, float]:
        if step >= up + down:
            passed = (step + 1 - up - down) / interval if interval else 0.0
            return lowest / (1 + decay * passed), largest * (1 + momentum_decay * passed)
        taken = step + 1  # 0 to 1 in `up` of them, and back in `down`
        share = taken / up if taken <= up else (up + down - taken) / down
        return lowest + (highest - lowest) * share, largest - (largest - least) * share if taken else least

    def schedule(step: int, base: float) -> dict[str, Any]:
        rate, momentum = rate_and_momentum(step)
        # The second one is 0.99 there as soon as the first is cycled, so it is here.
        return {"lr": rate, "betas": (momentum, 0.99)} if has_momentum else {"lr": rate}

    return schedule


def _range_test(found: Found) -> Schedule:
    """lowest * (1 + rate * steps / interval), to see which rate a training bears; in stairs, of whole intervals."""
    lowest, interval = found.pop("lr_range_test_min_lr", 1e-3), found.pop("lr_range_test_step_size", 2000)
    rate, stairs = found.pop("lr_range_test_step_rate", 1.0), found.pop("lr_range_test_staircase", False)
    if interval < 1:
        raise ValueError(f"lr_range_test_step_size must be at least 1, found {interval!r}")

    def schedule(step: int, base: float) -> dict[str, Any]:
        passed = (step + 1) / interval
        return {"lr": lowest * (1 + rate * (math.floor(passed) if stairs else passed))}

    return schedule


_SCHEDULES: dict[str, Callable[[Found], Schedule]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
_NEEDS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
