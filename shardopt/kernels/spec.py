"""What a kernel is compiled for: the rule's variant and the formats of its streams."""

from dataclasses import dataclass

from .formats import FP32, Format
from .translate import Arithmetic


@dataclass(frozen=True)
class StepSpec:
    """What a kernel is compiled for.

    Attributes:
        master: in which the fp32 value behind a param of low precision is kept; None: not at all. Of an fp32 param
            nothing is kept in any case.
        states: of each of the variant's states; none given: all in fp32.
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
        """Whether the param's own bits are needed: an fp32 master says it all."""
        return not self.has_master or self.master is not FP32

    @property
    def needs_noise(self) -> bool:
        """Whether anything is not rounded to nearest."""
        return any(each.rounding != "nearest" for each in (self.param, *self.states))
