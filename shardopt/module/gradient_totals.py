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
from ..kernels.reductions import COLUMNS
from ..kernels.tables import Factors, Gradients, sent

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
        self._places: list[torch.Tensor] = []  # in the report, of the totals of each launch

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

    def read(self, num_params: int, divisor: int) -> Array:
        """Returns the totals of all params: 2D [num_params, COLUMNS] int64; zeros where this rank holds nothing.

        Args:
            divisor: of each sum.
        """
        by_device: dict[torch.device, list[tuple[Array, torch.Tensor]]] = {}
        for params, totals in self._measure_all(divisor):
            by_device.setdefault(totals.device, []).append((params, totals))
        sums = np.zeros((num_params, COLUMNS), np.int64)
        for of_device in by_device.values():
            many, each = zip(*of_device, strict=True)
            rows, table = np.concatenate(many), each[0] if len(each) == 1 else torch.cat(each)
            sums[rows[rows >= 0]] = table.cpu().numpy()[rows >= 0]
        return sums

    def add_to(self, report: torch.Tensor, layout: ReportLayout, divisor: int) -> None:
        """Adds the totals of all params to a report on their device; the host does not wait."""
        for number, (params, totals) in enumerate(self._measure_all(divisor)):
            if number == len(self._places):
                self._places.append(sent(torch.from_numpy(layout.places(params)), report.device))
            report.index_add_(0, self._places[number], totals.view(-1).to(report.device))

    def _measure_all(self, divisor: int) -> Iterator[tuple[Array, torch.Tensor]]:
        """Yields the params of each row, and the totals, of each launch; in the same order in each backward."""
        if self._joined is None:
            self._joined, self._places = list(self._join()), []
        for grad, table, params in self._joined:
            yield params, totals_of(grad, table, Factors(divisor))
        for shard, totals in self._early.items():
            if totals is not None:
                yield self._params[shard], totals

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
