"""What kernels are compiled for: the passes of a rule, a kernel each, and the formats of their streams."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from .formats import FP32

if TYPE_CHECKING:
    from .formats import Format


class Pass(Protocol):
    """One pass of a rule, as the kernels see it: ``kernels/`` imports nothing of ``rules/``.

    A rule without norms has a single pass, which writes param and states and measures nothing.
    """

    def __hash__(self) -> int: ...

    @property
    def rule(self) -> str: ...

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the rule, the same for all of its passes."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """The columns of the table of scalars, the same for all passes of a rule."""

    @property
    def source(self) -> str:
        """Assignments on ``param``, ``grad``, ``state_<name>``, ``s_<name>``, ``measured_<k>`` and locals, one a line.

        ``measured_<k>``, for each number in ``measured``, is fp32: the kernel takes block sums of it.
        """

    @property
    def written(self) -> tuple[str, ...]:
        """States that are stored: the source assigns them."""

    @property
    def rounded(self) -> tuple[str, ...]:
        """States that are what their format holds, from their last assignment on."""

    @property
    def measured(self) -> tuple[int, ...]: ...

    @property
    def words(self) -> tuple[str, ...]:
        """What each measured value is for: ``norm``, ``mean_square`` or ``max_abs``."""

    @property
    def results(self) -> tuple[int, ...]:
        """The columns of the table of scalars that what the words give goes into."""

    @property
    def writes_param(self) -> bool:
        """True if ``param`` is stored."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names, at most one, that the source reads as it reads states: factor of a row times that of a column."""


@dataclass(frozen=True)
class Spec:
    """What the kernels of a rule are compiled for. Their streams are those of all passes, so that noise is the same.

    Attributes:
        master: format of the fp32 master of a param of low precision; None for no master. An fp32 param has none in any
            case.
        states: formats of the rule's states; if none are given, all are fp32.
        compares: an fp32 master becomes the param beside it where it does not round to it.
    """

    passes: tuple[Pass, ...]
    param: Format
    grad: Format
    master: Format | None = FP32
    states: tuple[Format, ...] = ()
    compares: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", self.states or (FP32,) * len(self.names))
        assert len(self.states) == len(self.names)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # each launch looks for its kernel by it
        return hash((self.passes, self.param, self.grad, self.master, self.states, self.compares))

    @cached_property
    def kernels(self) -> dict[Any, Any]:
        """The kernels that were compiled of this object, for a backend that would else look for one at each launch."""
        return {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the states."""
        return self.passes[0].states

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The columns of the table of scalars."""
        return self.passes[0].scalars

    @cached_property
    def has_master(self) -> bool:
        return self.param is not FP32 and self.master is not None

    @cached_property
    def needs_noise(self) -> bool:
        """True unless everything is rounded to nearest."""
        return any(each.rounding != "nearest" for each in (self.param, *self.states))

    @cached_property
    def has_product(self) -> bool:
        """True if the kernels take a table of products, see :mod:`.products`."""
        return bool(self.passes[0].products)
