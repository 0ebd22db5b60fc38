"""The memory that gathered units take, watched from below: where it is allocated and freed."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from shardopt import ShardedOptimizer
from shardopt.partition.memory import Memory


class Gathered:
    """Bytes of the units of an optimizer that is bound, pages included that were freed and not given back yet.

    Attributes:
        nbytes: of each unit by name.
        most: at once, so far.
    """

    def __init__(self, opt: ShardedOptimizer):
        units = opt.engine.domain.gatherer.units
        self._memories = [each.bucket.memory for unit in units.values() for each in unit.buckets]
        self._emptied: set[Memory] = set()  # freed, with their pages
        self.nbytes = {name: unit.nbytes for name, unit in units.items()}
        self.most = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        free, allocate, give_back = Memory.free, Memory.allocate, Memory.give_pages_back

        def frees(memory: Memory, keeps_pages: bool = False) -> bool:
            stays = free(memory, keeps_pages)
            if stays:
                self._emptied.add(memory)
            return stays

        def gives_back(memory: Memory) -> None:
            give_back(memory)
            self._emptied.discard(memory)

        def allocates(memory: Memory, freed: Memory | None = None) -> None:
            allocate(memory, freed)
            self._emptied -= {memory, freed}
            here = [each for each in self._memories if each.is_allocated or each in self._emptied]
            self.most = max(self.most, sum(each.nbytes for each in here))

        with patch.multiple(Memory, free=frees, allocate=allocates, give_pages_back=gives_back):
            yield
