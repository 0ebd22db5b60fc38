"""Chooses the formats of a param's master, states and gradient: as the options say, if the rule tolerates them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, get_args

import torch

from ..config.formats import StateFormat
from ..errors import BindingError
from ..kernels.formats import BF16, BF16_DITHERED, FP32, SIGNED4, SIGNED8, SPLIT, SPLIT24, UNSIGNED8, BlockFormat
from ..kernels.tables import BLOCK
from ..rules.rule import EMA

if TYPE_CHECKING:
    from ..config import Options
    from ..kernels.formats import Format
    from ..rules import Rule

DtypeOf = Callable[[torch.Tensor], torch.dtype]
OWN_DTYPE: DtypeOf = attrgetter("dtype")  # the model sees each param as it is

_PRECISIONS = get_args(StateFormat)  # from exact to coarse
# The formats of most states, and of those that are never negative: second moments, which are dithered.
_STATES: Mapping[str, tuple[Format, Format]] = {
    "fp32": (FP32, FP32),
    "bf16": (BF16, BF16_DITHERED),
    "int8": (SIGNED8, UNSIGNED8),
}
_GRADIENTS = {"fp32": FP32, "bf16": BF16}
TRAFFIC_FORMATS = {"int8": SIGNED8, "int4": SIGNED4}  # of what is quantized on the wire
_MASTERS = {"fp32": FP32, "split": SPLIT, "split24": SPLIT24, "none": None}


@dataclass(frozen=True)
class StreamFormats:
    """The formats of one bucket's masters, states and sums of gradients.

    Attributes:
        master: None for fp32 params, and for params with stochastic rounding in place of a master.
        states: the format of every state that the rule may keep.
        gradient: the format of the sums over ranks and backwards, if the module was handed over.
        compares: an update compares an fp32 master with its param.
    """

    master: Format | None
    states: Mapping[str, Format]
    gradient: Format = FP32
    compares: bool = True

    @functools.cached_property
    def key(self) -> tuple[str, ...]:
        """Equal for params that may share a bucket."""
        return ("" if self.master is None else self.master.name, *(each.name for each in self.states.values()))


NOTHING = StreamFormats(None, {})


def itemsize_of(format: Format | None) -> float:
    """Returns the bytes of an element, with its share of a block's scale; codes of 4 bits travel two in a byte."""
    if format is None:
        return 0
    return format.bits / 8 + torch.float32.itemsize / BLOCK if isinstance(format, BlockFormat) else format.itemsize


def formats_for(rule: Rule, options: Options, dtype: torch.dtype, numel: int) -> StreamFormats:
    """Returns the formats of a param with ``numel`` elements in all, however many this rank owns.

    Raises:
        BindingError: params of this dtype cannot have the master that the options name.
    """
    states = {name: _state(rule, options, name, numel) for name in rule.states}
    master, gradient = _master(options.master, dtype), _gradient(options.gradient_format, dtype)
    return StreamFormats(master, states, gradient, options.tuning.compare_masters)


def check_formats(rule: Rule, options: Options) -> None:
    """Raises ValueError if the rule does not keep a state that the options name, or tolerates only finer formats."""
    asked = options.state_format
    named = {} if isinstance(asked, str) else asked
    for name, precision in named.items():
        if name not in rule.states:
            raise ValueError(
                f"remove {name!r} from state_format: {rule.name} does not keep such a state (it keeps "
                f"{list(rule.states)}), and the entry would have no effect."
            )
        if _PRECISIONS.index(precision) > _PRECISIONS.index(rule.tolerates(name)):
            raise ValueError(
                f"use {rule.tolerates(name)!r} for {name!r}: state_format gives {precision!r}, which is too "
                f"coarse for {rule.name}: "
                "the small changes of a step would be rounded away, or differences become negative."
            )


def counts_steps(rule: Rule, options: Options) -> bool:
    """True if a state dict holds each param's count of steps: its rule counts, or stochastic rounding depends on it."""
    states = (_state(rule, options, name, options.tuning.compress_from) for name in rule.states)
    return rule.counts_steps or options.master == "none" or any(each.rounding != "nearest" for each in states)


def _master(asked: str, dtype: torch.dtype) -> Format | None:
    if dtype is torch.float32:
        return None
    if asked != "fp32" and dtype is not torch.bfloat16:
        raise BindingError(
            f"use bfloat16 params, or master='fp32': master={asked!r} was given and there are params of {dtype}, but "
            "only a bfloat16 number is the upper half of an fp32 one, and stochastic rounding cannot help a range that "
            "loses small updates altogether."
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
    # An average of the weights, too, changes by a thousandth in a step; check_formats() allows it nothing coarser.
    if precision == "bf16" and name == EMA:
        return BF16_DITHERED
    return _STATES[precision][name in rule.nonnegative]
