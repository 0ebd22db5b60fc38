"""The totals of this rank's slices of the sums of gradients, as each backward ends.

Sums that stay on the device are measured together, by one launch, when all of them are there. Sums that do not stay
are measured one by one: they go to host memory, or are used up at once. All totals come to the host by one copy, for
which it waits.

On a CPU, large sums of messages are measured one by one as well, those that are complete while the last messages of a
backward are on their way::

    this rank    ... encode  send | measure 0, 1, 2 | sum 3 | measure 3 | report          time ->
    wire                           ------- 3 ------>
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..domain.shard_tables import joined_table
from ..kernels.launch import totals_of
from ..kernels.tables import Factors, Gradients, read_together, sent

if TYPE_CHECKING:
    from ..domain.shard import Shard
    from ..kernels.formats import Format
    from .gradient_report import ReportLayout

    Array = np.ndarray[Any, Any]


# Elements of a slice from which on it takes much longer to measure than to call for it.
MEASURED_ALONE = 1 << 16


class GradientTotals:
    """The totals of the shards of one domain.

    Attributes:
        has_large: some sums may be measured while others are on their way.
    """

    def __init__(self) -> None:
        # 1D [rows]: the number of each row's param; -1 for blocks without a param.
        self._params: dict[Shard, Array] = {}
        # For each launch: the format and the table of the sums that it measures, and the params of its rows. None once
        # shards were added.
        self._joined: list[tuple[Format, Gradients, Array]] | None = None
        self._early: dict[Shard, torch.Tensor | None] = {}  # of the shards that are measured one by one
        self._alone: dict[Shard, torch.Tensor | None] = {}  # of those whose large sums stay; None: not measured yet
        self.has_large = False
        self._places: dict[int | Shard, torch.Tensor] = {}  # in the report, of the totals of each launch

    def add(self, shard: Shard, params: Array, is_early: bool, is_awaited: bool) -> None:
        """Adds a shard, whose totals are measured from now on.

        Args:
            params: 1D [pieces] int64, the number of the param that each piece is of.
            is_early: True if ``measure`` is called in each round, as the sum does not stay.
            is_awaited: True if this rank waits for the messages of sums, and may measure others meanwhile.
        """
        # A shard without a piece counts too: its params lengthen the report, which moves the places of all numbers.
        # Test: test_params_that_come_later_move_the_places in tests/module/test_gradient_report.py.
        self._joined = None
        if len(params):
            self._params[shard] = np.append(params, -1)
            if is_early:
                self._early[shard] = None
            elif is_awaited and shard.numel >= MEASURED_ALONE:
                self._alone[shard], self.has_large = None, True

    def measure(self, shard: Shard, grad: Format, gradients: Gradients, divisor: int) -> torch.Tensor | None:
        """Measures a sum that does not stay. Returns the totals, on their device; None: no param is in it."""
        if shard not in self._params:
            return None
        found = self._early[shard] = totals_of(grad, gradients, Factors(divisor))
        return found

    def measure_meanwhile(self, is_whole: Callable[[int], bool], divisor: int) -> None:
        """Measures large sums that are whole, by the number of their bucket, for the report that comes next."""
        self._alone = {shard: _alone(shard, divisor) if is_whole(shard.number) else None for shard in self._alone}

    def add_to(self, report: torch.Tensor, layout: ReportLayout, divisor: int) -> None:
        """Adds the totals of all params to a report. The host does not wait for one on their device.

        Args:
            divisor: of each sum.
        """
        if self._joined is None:
            self._joined, self._places = list(self._join()), {}
        # Of each launch what it is told by, the params of each row, and the totals.
        launches: list[tuple[int | Shard, Array]] = []
        measured: list[torch.Tensor] = []
        for number, (grad, table, params) in enumerate(self._joined):
            launches += ((number, params),)
            measured += (totals_of(grad, table, Factors(divisor)),)
        for shard in self._early:
            totals = self._early[shard]
            if totals is not None:
                launches += ((shard, self._params[shard]),)
                measured += (totals,)
        for shard in self._alone:
            totals = self._alone[shard]
            launches += ((shard, self._params[shard]),)
            measured += (_alone(shard, divisor) if totals is None else totals,)
            self._alone[shard] = None  # a later report finds another sum
        if report.device.type == "cpu":
            measured = read_together(measured)
        for (launch, params), totals in zip(launches, measured, strict=True):
            if launch not in self._places:
                self._places[launch] = sent(torch.from_numpy(layout.places(params)), report.device)
            report.index_add_(0, self._places[launch], totals.view(-1).to(report.device))

    def _join(self) -> Iterator[tuple[Format, Gradients, Array]]:
        alike: dict[tuple[Format, torch.device], list[Shard]] = {}
        for shard in self._params:
            if shard not in self._early and shard not in self._alone:
                alike.setdefault((shard.formats.gradient, shard.device), []).append(shard)
        for (grad, _), shards in alike.items():
            table = joined_table(
                [shard.tables for shard in shards], [shard.sum_table for shard in shards], grad.itemsize
            ).there()
            yield grad, table, np.concatenate([self._params[shard] for shard in shards])


def _alone(shard: Shard, divisor: int) -> torch.Tensor:
    return totals_of(shard.formats.gradient, shard.sum_table, Factors(divisor))
