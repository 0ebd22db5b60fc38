"""What a kernel is compiled for: the rule's variant and the formats of its streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .formats import FP32

if TYPE_CHECKING:
    from .formats import Format
    from .translate import Arithmetic


@dataclass(frozen=True)
class StepSpec:
    """What a kernel is compiled for.

    Attributes:
        master: format of the fp32 master of a param of low precision; None for no master. An fp32 param has none in any
            case.
        states: formats of the variant's states; if none are given, all are fp32.
    """

    variant: Arithmetic
    param: Format
    grad: Format
    master: Format | None = FP32
    states: tuple[Format, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", self.states or (FP32,) * len(self.variant.states))
        assert len(self.states) == len(self.variant.states)

    @property
    def has_master(self) -> bool:
        return self.param is not FP32 and self.master is not None

    @property
    def reads_param(self) -> bool:
        """True if the kernel reads the param: not if an fp32 master holds its full value."""
        return not self.has_master or self.master is not FP32

    @property
    def needs_noise(self) -> bool:
        """True unless everything is rounded to nearest."""
        return any(each.rounding != "nearest" for each in (self.param, *self.states))

    @property
    def writes_param(self) -> bool:
        """True if the kernel stores the param, as all do but the first passes of a rule."""
        return True

    @property
    def written(self) -> tuple[str, ...]:
        """The states that the kernel stores."""
        return self.variant.states
