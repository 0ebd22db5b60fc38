"""What masters, states and gradients of a param are kept in: as it was asked for, and as the rule tolerates."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config import Options
from ..errors import BindingError
from ..kernels.formats import (
    BF16,
    BF16_DITHERED,
    FP32,
    SIGNED8,
    SPLIT,
    SPLIT24,
    UNSIGNED8,
    Format,
)
from ..rules import Rule
from ..rules.rule import EMA

# From exact to coarse.
_PRECISIONS = ("fp32", "bf16", "int8")
_GRADIENTS = {"fp32": FP32, "bf16": BF16}
_MASTERS = {"fp32": FP32, "split": SPLIT, "split24": SPLIT24, "none": None}


@dataclass(frozen=True)
class Kept:
    """The formats of one bucket's masters, states and sums of gradients.

    Attributes:
        master: None where there is none: of fp32 params, and where they are rounded by chance instead.
        states: of every state that the rule may keep.
        gradient: of the sums over ranks and backwards, where the module is handed over.
    """

    master: Format | None
    states: Mapping[str, Format]
    gradient: Format = FP32

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for what may share a bucket."""
        return ("" if self.master is None else self.master.name, *(each.name for each in self.states.values()))


NOTHING = Kept(None, {})


def kept_for(rule: Rule, options: Options, dtype: torch.dtype, numel: int) -> Kept:
    """For a param of ``numel`` elements in all, whatever of it this rank owns.

    Raises:
        BindingError: a master that params of this dtype cannot have.
        ValueError: a state that the rule does not keep, or in less than it tolerates.
    """
    states = {name: _state(rule, options, name, numel) for name in rule.states}
    return Kept(_master(options.master, dtype), states, _gradient(options.gradient_format, dtype))


def check_formats(rule: Rule, options: Options) -> None:
    """Raises ValueError as :func:`kept_for` would."""
    asked = options.state_format
    named = {} if isinstance(asked, str) else asked
    for name, precision in named.items():
        if name not in rule.states:
            raise ValueError(
                f"state_format names {name!r}, which {rule.name} does not keep (it keeps {list(rule.states)}): it "
                "would have no effect. Remove it."
            )
        if _is_coarser(precision, rule.tolerates(name)):
            raise ValueError(
                f"state_format asks for {name!r} in {precision}, of which {rule.name} tolerates no less than "
                f"{rule.tolerates(name)}: the small changes of a step would be rounded away, or differences become "
                f"negative. Use {rule.tolerates(name)!r} for it."
            )


def counts_steps(rule: Rule, options: Options) -> bool:
    """Whether a state dict holds each param's count of steps: its rule does, or rounding depends on it."""
    states = (_state(rule, options, name, options.tuning.compress_from) for name in rule.states)
    return rule.counts_steps or options.master == "none" or any(each.rounding != "nearest" for each in states)


def _master(asked: str, dtype: torch.dtype) -> Format | None:
    if dtype is torch.float32:
        return None
    if asked != "fp32" and dtype is not torch.bfloat16:
        raise BindingError(
            f"master={asked!r} was asked for and there are params of {dtype}: only a bfloat16 number is the upper half "
            "of an fp32 one, and rounding by chance cannot help a range that loses small updates altogether. Use "
            "bfloat16 params, or master='fp32'."
        )
    return _MASTERS[asked]


def _gradient(asked: str, dtype: torch.dtype) -> Format:
    return FP32 if dtype is torch.float32 else _GRADIENTS[asked]


def _state(rule: Rule, options: Options, name: str, numel: int) -> Format:
    if numel < options.tuning.compress_from:
        return FP32
    precision: str
    if isinstance(options.state_format, str):
        precision = min(options.state_format, rule.tolerates(name), key=_PRECISIONS.index)
    else:
        precision = options.state_format.get(name, "fp32")
    if precision == "int8":
        return UNSIGNED8 if name in rule.nonnegative else SIGNED8
    if precision == "bf16":
        return BF16_DITHERED if name in rule.nonnegative or name == EMA else BF16
    return FP32


def _is_coarser(one: str, other: str) -> bool:
    return _PRECISIONS.index(one) > _PRECISIONS.index(other)
