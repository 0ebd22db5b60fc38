"""The scheduler section of a DeepSpeed config: which curve it is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .deepspeed_keys import Keys, Kind, count, flag, number, text
from .warmup import Curve, Cycle, OneCycleLR, RangeTestLR, Warmup, WarmupCosineLR, WarmupLR


def curve_of(keys: Keys, has_betas: bool) -> Curve | None:
    if not keys.has("scheduler"):
        return None
    kind = keys.take("scheduler.type", text, "")
    found = keys.take_all("scheduler.params", _kind_of)
    make = _CURVES.get(kind)
    if make is None:
        keys.errors.append(
            f"scheduler.type={kind!r}: there are {', '.join(_CURVES)}; leave it out and use one of torch's on "
            "run.optimizer"
        )
        return None
    if found.pop("last_batch_iteration", -1) != -1:
        keys.errors.append("scheduler.params.last_batch_iteration: load the state dict of the run that is resumed")
    for name in _CURVE_NEEDS.get(kind, ()):
        if name not in found:
            if f"scheduler.params.{name}" not in keys.unfilled:
                keys.errors.append(f"scheduler.params.{name} is missing, which {kind} needs")
            found[name] = 1
    try:
        curve = make(found)
    except ValueError as error:
        keys.errors.append(f"scheduler.params: {str(error).removesuffix('.')}")
        return None
    if isinstance(curve, OneCycleLR) and curve.momentum is not None and not has_betas:
        curve = replace(curve, momentum=None)
        keys.warnings.append("scheduler.params.cycle_momentum (of an optimizer without betas nothing is cycled)")
    keys.errors += [f"scheduler.params.{name}={value!r}: not known here" for name, value in found.items()]
    return curve


def _kind_of(name: str) -> Kind:
    if name in ("cycle_momentum", "lr_range_test_staircase"):
        return flag
    if name == "warmup_type":
        return text
    return count if name.endswith(("_steps", "_size", "_count")) else number


# Each takes what it knows out of the section's params.
Found = dict[str, Any]


def _warmup(found: Found) -> Warmup:
    return Warmup(found.pop("warmup_num_steps", 1000), found.pop("warmup_type", "log"))


def _warmup_lr(found: Found) -> Curve:
    return WarmupLR(_warmup(found), found.pop("warmup_min_lr", 0.0), found.pop("warmup_max_lr", None))


def _warmup_decay(found: Found) -> Curve:
    rates = found.pop("warmup_min_lr", 0.0), found.pop("warmup_max_lr", 1e-3)
    return WarmupLR(_warmup(found), *rates, found.pop("total_num_steps"))


def _cosine(found: Found) -> Curve:
    shares = found.pop("warmup_min_ratio", 0.0), found.pop("cos_min_ratio", 1e-4)
    return WarmupCosineLR(_warmup(found), found.pop("total_num_steps"), *shares)


def _one_cycle(found: Found) -> Curve:
    up = found.pop("cycle_first_step_size", 2000)
    down = found.pop("cycle_second_step_size", None)
    for stairs in ("cycle_first_stair_count", "cycle_second_stair_count"):
        if not found.get(stairs, 0):
            found.pop(stairs, None)
    rates = found.pop("cycle_min_lr"), found.pop("cycle_max_lr"), found.pop("decay_lr_rate", 0.0)
    momentum = found.pop("cycle_min_mom", 0.8), found.pop("cycle_max_mom", 0.9), found.pop("decay_mom_rate", 0.0)
    cycle = Cycle(up, up if down is None else down, found.pop("decay_step_size", 0))
    return OneCycleLR(cycle, *rates, momentum if found.pop("cycle_momentum", True) else None)


def _range_test(found: Found) -> Curve:
    start, steps = found.pop("lr_range_test_min_lr", 1e-3), found.pop("lr_range_test_step_size", 2000)
    rate, stairs = found.pop("lr_range_test_step_rate", 1.0), found.pop("lr_range_test_staircase", False)
    return RangeTestLR(start, steps, rate, stairs)


_CURVES: dict[str, Callable[[Found], Curve]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
_CURVE_NEEDS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
