"""The ways to run a training that a plan compares: all combinations of stage, dtype, formats and tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from ..arguments import flag, number, whole, word
from ..config import Options
from ..option import choices_of, planned

if TYPE_CHECKING:
    from ..config import GradientFormat, Master, Stage, StateFormat

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
PLANNED = tuple(planned(Options))  # (field, flag) of the options that are fields of a way


@dataclass(frozen=True)
class Way:
    """One way to run a training.

    Attributes:
        stage: what is sharded.
        has_module: True if the module is handed over; else DDP reduces gradients, and keeps its buckets.
        dtype: of params.
        master, state_format, gradient_format, ema, release_gradients: the options with these names.
        tier: where masters and states are kept: "device", "host" (``offload="cpu"``) or "disk".
        fraction: the part of masters and states that is offloaded (``Offload(fraction=)``); 1 on the device.
        sums_rest: True if sums of gradients are offloaded to host memory (``Offload(gradients="cpu")``).
        early_bytes: of copies that a backward updates for the step to take (``Offload(early_bytes=)``).
        compute_dtype: the option with this name, of fp32 params.
    """

    stage: Stage
    has_module: bool
    dtype: torch.dtype
    master: Master = "fp32"
    state_format: StateFormat = "fp32"
    tier: Tier = "device"
    gradient_format: GradientFormat = "fp32"
    ema: float | None = None
    release_gradients: bool = False
    sums_rest: bool = False
    fraction: float = 1.0
    early_bytes: int = 0
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a field of another kind."""
        whole(self.stage, "Way.stage", least=0, most=3)
        for name in ("has_module", "release_gradients", "sums_rest"):
            flag(getattr(self, name), f"Way.{name}")
        number(self.fraction, "Way.fraction", above=0, most=1)
        whole(self.early_bytes, "Way.early_bytes", least=0)
        if self.ema is not None:
            number(self.ema, "Way.ema", least=0, below=1)
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"Way.dtype takes a torch.dtype, such as torch.bfloat16, found {self.dtype!r}.")
        if self.compute_dtype is not None and not (self.has_module and self.dtype is torch.float32):
            raise ValueError(
                f"give has_module=True and dtype=torch.float32, or omit compute_dtype={self.compute_dtype}: a module "
                f"of fp32 params that is handed over computes in it, found {self.dtype}."
            )
        word(self.tier, "Way.tier", TIERS)
        for field, _ in PLANNED:
            if choices := choices_of(field.type):
                word(getattr(self, field.name), f"Way.{field.name}", choices)

    @property
    def seen(self) -> torch.dtype:
        """The dtype in which the model sees its params."""
        return self.compute_dtype or self.dtype

    @property
    def options(self) -> dict[str, Any]:
        """The fields of :class:`shardopt.config.Options` that differ from their defaults, but for stage and offload."""
        found = {field: getattr(self, field.name) for field, _ in PLANNED}
        return {field.name: value for field, value in found.items() if value != field.default}

    @property
    def is_exact(self) -> bool:
        """True if masters, states and sums of gradients keep all of fp32."""
        if self.seen is torch.float32:
            return self.state_format == "fp32"
        return (self.state_format, self.gradient_format) == ("fp32", "fp32") and self.master in ("fp32", "split")

    def __str__(self) -> str:
        name = f"stage {self.stage}" + ("" if self.has_module else ", params only")
        parts = [f"{name}, {str(self.dtype).removeprefix('torch.')}"]
        parts += [f"computed in {str(self.seen).removeprefix('torch.')}"] * (self.compute_dtype is not None)
        given = self.options
        parts += [
            f"{words.label} {given[field.name]}" if choices_of(field.type) else words.label
            for field, words in PLANNED
            if field.name in given
        ]
        part = "" if self.fraction == 1 else f"{self.fraction:.0%} "
        parts += [f"{part}on {self.tier}"] * (self.tier != "device")
        parts += ["gradients on host"] * self.sums_rest
        parts += ["early updates"] * bool(self.early_bytes)
        return ", ".join(parts)


_STAGES: tuple[tuple[Stage, bool], ...] = ((0, False), (0, True), (1, False), (1, True), (2, True), (3, True))
WAYS = tuple(
    Way(stage, has_module, dtype) for dtype in (torch.float32, torch.bfloat16) for stage, has_module in _STAGES
)


def possible(way: Way) -> Way:
    """Returns the way without combinations that binding refuses.

    Only bf16 params have masters of other formats than fp32, and sums of gradients in bf16. Gradients are released with
    the module, and without a disk (which binding refuses for params on a GPU); released gradients have no sums. Sums
    are offloaded at stage 2 and 3, together with states. Backward updates copies of states in host memory alone.
    """
    is_low = way.seen is torch.bfloat16
    releases = way.release_gradients and way.has_module and way.tier != "disk"
    return replace(
        way,
        master=way.master if is_low and way.compute_dtype is None else "fp32",
        gradient_format=way.gradient_format if is_low and way.has_module and not releases else "fp32",
        release_gradients=releases,
        fraction=1.0 if way.tier == "device" else way.fraction,
        sums_rest=way.sums_rest and way.has_module and way.stage >= 2 and way.tier != "device",
        early_bytes=way.early_bytes if way.has_module and way.stage and way.tier == "host" and not releases else 0,
    )


def every_way(ways: Sequence[Way] = WAYS) -> list[Way]:
    """Returns these ways in every combination of master, formats of states and gradients, and tiers."""
    searched: dict[str, Sequence[Any]] = {
        **{field.name: choices for field, _ in PLANNED if (choices := choices_of(field.type))},
        "tier": TIERS,
        "sums_rest": (False, True),
    }
    changes: list[dict[str, Any]] = [dict(zip(searched, each, strict=True)) for each in product(*searched.values())]
    return list(dict.fromkeys(possible(replace(way, **each)) for way, each in product(ways, changes)))
