"""A rule whose second moment is factored: means over the rows and the columns of a param, in place of its elements.

::

    margins of a 2D param        row_var  x          each row's mean,
    of 3 x 4 elements                     x          over its columns
                                          x
                                 col_var  x x x x    each column's mean, over its rows

    product                      an element's is that of its row's factor and its column's

The last two dimensions make a matrix; those before it number matrices. A margin is a state with one value for each row
or each column of these, whose shape is the param's with 1 in place of a dimension, as torch's Adafactor has it. Every
rank keeps margins whole: they are smaller than a param by as much as it has rows or columns. A step has three parts::

    sums of squares of the gradient     partial ones on each rank, added up by one all-reduce for all params
    factors                             a function of these means and the margins, the same on every rank
    passes                              the rule, elementwise, which reads the product as if it were a state

Sums are of float64, in which the square of an fp32 number is exact: an error below numel * 2**-53, of positive terms.
The order of addition follows from where shards end (``kernels/products.py``); it is that of a CPU on a GPU too. So a
margin is the same on every rank, in every chunk, tier and number of threads; and between two numbers of ranks, or sizes
of buckets, fp32 margins differ in their last bit where a sum lies within 2**-53 of a tie: about once in 10**8 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .rule import Rule, Shape, Variant, _averaging

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# (margin -> fp32 mean of the gradient's squares, margin -> its values, scalars of the param) -> (margin -> its new
# values, factors of the rows, factors of the columns).
FactorFunction = Callable[
    [Mapping[str, "Array"], Mapping[str, "Array"], Mapping[str, float]],
    tuple[dict[str, "Array"], "Array", "Array"],
]


@dataclass(frozen=True, kw_only=True)
class FactoredRule(Rule):
    """A rule with margins; the decorator :func:`factored` makes it of a rule that reads the product as a state."""

    elementwise: Rule  # of which the product is a state
    product: str
    means: Mapping[str, int] = field(compare=False, hash=False)  # margin -> dimension that it is the mean over
    factors: FactorFunction = field(compare=False, hash=False, repr=False)

    @property
    def margins(self) -> tuple[str, ...]:
        """See :attr:`Rule.margins`."""
        return tuple(self.means)

    def state_shape(self, name: str, shape: Shape) -> tuple[int, ...]:
        """See :meth:`Rule.state_shape`."""
        found = list(shape)
        if name in self.means:
            found[self.means[name]] = 1
        return tuple(found)

    def variant(self, group: Mapping[str, Any], shape: Shape = ()) -> Variant:
        """See :meth:`Rule.variant`."""
        found = _without_product(self.elementwise.variant(group, shape), self.product, self.margins)
        return found if self.average is None else _averaging(found)


@functools.cache
def _without_product(variant: Variant, product: str, margins: tuple[str, ...]) -> Variant:
    if product not in variant.states:
        return variant
    states = tuple(name for name in variant.states if name != product)
    return replace(variant, states=states, products=(product,), margins=margins)


def factored(*, product: str, means: Mapping[str, int], factors: FactorFunction) -> Callable[[Rule], FactoredRule]:
    """Makes a factored rule of an elementwise one.

    Args:
        product: the state of the rule that is none, but the product of a factor of its row and one of its column.
        means: margin -> the dimension, -1 or -2, over which it is a mean of the gradient's squares.
        factors: makes new margins and the factors, of small arrays.
    """

    def decorate(elementwise: Rule) -> FactoredRule:
        own = {name: getattr(elementwise, name) for name in Rule.__dataclass_fields__}
        states = tuple(name for name in elementwise.states if name != product)
        return FactoredRule(
            **{**own, "states": states}, elementwise=elementwise, product=product, means=means, factors=factors
        )

    return decorate
