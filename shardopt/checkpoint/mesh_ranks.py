"""All ranks of one model where no process group holds all of them, but groups that are the dimensions of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks

Value = TypeVar("Value")
Holder = tuple[int, ...]  # the global numbers of ranks that hold the same params


def numbers_of(ranks: Ranks) -> Holder:
    """Returns the global numbers of ranks, by rank."""
    return (0,) if ranks.group is None else tuple(dist.get_process_group_ranks(ranks.group))


class MeshRanks:
    """All ranks of a mesh, found from the groups of its dimensions: the data-parallel and tensor-parallel ones, say.

    A value reaches all ranks in one exchange a dimension: each rank passes on what it received in those before.
    """

    def __init__(self, dimensions: Sequence[Ranks]):
        """Collective.

        Raises:
            CheckpointError: the groups are not the dimensions of one mesh.
        """
        self._dimensions, self._own = dimensions, str(dist.get_rank())
        self.seconds = min(ranks.seconds for ranks in dimensions)
        phase = "finding all ranks of the model"
        self._ranks = sorted(self._gather(None, phase), key=int)
        found_by = self._gather(self._ranks, phase)
        is_mesh = self._gather(all(each == self._ranks for each in found_by.values()), phase)
        if not all(is_mesh.values()):
            raise CheckpointError(
                "give norm_group= all ranks that train the model (torch.distributed.group.WORLD, say): its "
                f"data-parallel and tensor-parallel ranks, {[list(numbers_of(each)) for each in dimensions]} here, are "
                "not the dimensions of one mesh, so it is not known which ranks make a checkpoint together."
            )
        self.size, self.rank = len(self._ranks), self._ranks.index(self._own)

    def exchange(self, row: Sequence[int], phase: str) -> list[list[int]]:
        """Collective: returns every rank's row, by rank."""
        return self.exchange_json(list(row), phase)

    def exchange_json(self, value: Value, phase: str) -> list[Value]:
        """Collective: returns every rank's JSON-able value, by rank."""
        gathered = self._gather(value, phase)
        return [gathered[rank] for rank in self._ranks]

    def _gather(self, value: Value, phase: str) -> dict[str, Value]:
        """Collective: returns the values by the global number of the rank that gave each."""
        gathered = {self._own: value}
        for ranks in self._dimensions:
            for theirs in ranks.exchange_json(gathered, phase):
                gathered.update(theirs)
        return gathered
