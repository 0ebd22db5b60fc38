"""The totals of this rank's slices of the sums of gradients, as each backward ends.

Sums that stay on the device are measured together, by one launch, when all of them are there. Sums that do not stay
are measured one by one: they go to host memory, or are used up at once. All totals come to the host by one copy, for
which it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class GradientTotals:
    """The totals of the shards of one domain."""

    def __init__(self) -> None:
        # 1D [rows]: the number of each row's param; -1 for blocks without a param.
        self._params: dict[Shard, Array] = {}
        # For each launch: the format and the table of the sums that it measures, and the params of its rows. None once
        # shards were added.
        self._joined: list[tuple[Format, Gradients, Array]] | None = None
        self._early: dict[Shard, torch.Tensor | None] = {}  # of the shards that are measured one by one
        self._places: dict[int | Shard, torch.Tensor] = {}  # in the report, of the totals of each launch

    def add(self, shard: Shard, params: Array, is_early: bool) -> None:
        """Adds a shard, whose totals are measured from now on.

        Args:
            params: 1D [pieces] int64, the number of the param that each piece is of.
            is_early: True if ``measure`` is called in each round, as the sum does not stay.
        """
        # A shard without a piece counts too: its params lengthen the report, which moves the places of all numbers.
        # Test: test_params_that_come_later_move_the_places in tests/module/test_gradient_report.py.
        self._joined = None
        if len(params):
            self._params[shard] = np.append(params, -1)
            if is_early:
                self._early[shard] = None

    def measure(self, shard: Shard, grad: Format, gradients: Gradients, divisor: int) -> torch.Tensor | None:
        """Measures a sum that does not stay. Returns the totals, on their device; None: no param is in it."""
        if shard not in self._params:
            return None
        found = self._early[shard] = totals_of(grad, gradients, Factors(divisor))
        return found

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
        if report.device.type == "cpu":
            measured = read_together(measured)
        for (launch, params), totals in zip(launches, measured, strict=True):
            if launch not in self._places:
                self._places[launch] = sent(torch.from_numpy(layout.places(params)), report.device)
            report.index_add_(0, self._places[launch], totals.view(-1).to(report.device))

    def _join(self) -> Iterator[tuple[Format, Gradients, Array]]:
        alike: dict[tuple[Format, torch.device], list[Shard]] = {}
        for shard in self._params:
            if shard not in self._early:
                alike.setdefault((shard.formats.gradient, shard.device), []).append(shard)
        for (grad, _), shards in alike.items():
            table = joined_table(
                [shard.tables for shard in shards], [shard.sum_table for shard in shards], grad.itemsize
            ).there()
            yield grad, table, np.concatenate([self._params[shard] for shard in shards])
