"""What the kernel of one pass is compiled for, where a rule looks at whole params: see ``rules/passes.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .spec import StepSpec
from .translate import Arithmetic


class PassArithmetic(Arithmetic, Protocol):
    """One pass of a rule, as the kernels see it.

    Its source assigns ``measured_<k>`` for each number in ``measured``: fp32, of which the kernel takes block sums.
    """

    @property
    def assigned(self) -> tuple[str, ...]:
        """States that the source assigns."""

    @property
    def rounded(self) -> tuple[str, ...]:
        """Those of them that are what their format holds, from their last assignment on."""

    @property
    def written(self) -> tuple[str, ...]:
        """Those of them that are stored."""

    @property
    def measured(self) -> tuple[int, ...]: ...

    @property
    def writes_param(self) -> bool:
        """True if ``param`` is stored."""

    @property
    def products(self) -> tuple[str, ...]:
        """Names, at most one, that the source reads as it reads states: factor of a row times that of a column."""


@dataclass(frozen=True)
class PassSpec(StepSpec):
    """What the kernel of a pass is compiled for. Its streams are those of all passes, so that noise is the same."""

    variant: PassArithmetic

    @property
    def writes_param(self) -> bool:
        return self.variant.writes_param

    @property
    def written(self) -> tuple[str, ...]:
        return self.variant.written

    @property
    def has_product(self) -> bool:
        """True if the kernel takes a table of products, see :mod:`.products`."""
        return bool(self.variant.products)
