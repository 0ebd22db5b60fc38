"""The ranks of one model where no process group holds them all: those of several groups that cross each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks

Holder = tuple[int, ...]  # the global numbers of ranks that hold the same


def numbers_of(ranks: Ranks) -> Holder:
    """Returns the global numbers of ranks, by rank."""
    return (0,) if ranks.group is None else tuple(dist.get_process_group_ranks(ranks.group))


class Everyone:
    """All ranks of the dimensions of a mesh, data-parallel and tensor-parallel ones, say.

    What a rank tells reaches all others in one exchange a dimension: each passes on what it heard in those before.
    """

    def __init__(self, dimensions: Sequence[Ranks]):
        """Collective.

        Raises:
            CheckpointError: the groups are not the dimensions of one mesh.
        """
        self._dimensions, self._own = dimensions, str(dist.get_rank())
        self.seconds = min(ranks.seconds for ranks in dimensions)
        phase = "finding all ranks of the model"
        heard = self._told(None, phase)
        self._ranks = sorted(heard, key=int)
        everyones = self._told(self._ranks, phase)
        alike = self._told(all(each == self._ranks for each in everyones.values()), phase)
        if not all(alike.values()):
            raise CheckpointError(
                "give norm_group= all ranks that train the model (torch.distributed.group.WORLD, say): its "
                f"data-parallel and tensor-parallel ranks, {[list(numbers_of(each)) for each in dimensions]} here, are "
                "not the dimensions of one mesh, so it is not known which ranks make a checkpoint together."
            )
        self.size, self.rank = len(self._ranks), self._ranks.index(self._own)

    def exchange(self, row: Sequence[int], phase: str) -> list[list[int]]:
        """Collective: returns every rank's row, by rank."""
        return self.exchange_json(list(row), phase)

    def exchange_json(self, value: Any, phase: str) -> list[Any]:
        """Collective: returns every rank's JSON-able value, by rank."""
        heard = self._told(value, phase)
        return [heard[rank] for rank in self._ranks]

    def _told(self, value: Any, phase: str) -> dict[str, Any]:
        heard = {self._own: value}
        for ranks in self._dimensions:
            for theirs in ranks.exchange_json(heard, phase):
                heard.update(theirs)
        return heard
