"""A machine: one GPU, one rank of several, and the account of what is done in which order."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

from torch import Tensor, nn

from shardopt.offload import sum_of_products
from tests.support.compiled import nothing_compiled

from . import cuda, disk, hooks, kernels, tensors
from .book import Book
from .counts import Counts
from .group import Group, beside
from .operations import Operations
from .record import Record


class Machine:
    """Within it, this process has a GPU."""

    def __init__(self, world: int = 8, leaf_streams: int = 0):
        """
        Args:
            leaf_streams: on how many streams autograd runs the hooks of params; 0: on the current one.
        """
        self.book = Book()
        self.group = Group(self.book, world) if world > 1 else None
        self._leaf_streams = leaf_streams
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for each in (cuda.stand_in, tensors.on_card, kernels.carried_out):
            self._stack.enter_context(each(self.book))
        sum_of_products._numbers.cache_clear()  # another machine's memory
        self._stack.callback(sum_of_products._numbers.cache_clear)
        self._stack.enter_context(beside())
        self._stack.enter_context(nothing_compiled())
        if self._leaf_streams:
            self._stack.enter_context(hooks.on_streams(self.book, self._leaf_streams))
        self._stack.enter_context(Operations(self.book))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def move(self, model: nn.Module) -> nn.Module:
        """Puts a model's params and buffers on the device."""
        for each in (*model.parameters(), *model.buffers()):
            self.book.region(each, is_device=True)
        return model

    def tensor(self, values: Tensor) -> Tensor:
        """Puts values on the device."""
        return tensors.transfer(self.book, values, to_device=True)

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Within, what the package does is counted for this phase."""
        return self.book.counts.during(phase)

    @contextmanager
    def recording(self, larger: int = 1) -> Iterator[Record]:
        """Within, all works are written down; ``larger`` is a record's."""
        with disk.written_down(self.book):
            self.book.record = Record(larger)
            try:
                yield self.book.record
            finally:
                self.book.record = None

    def other_thread(self) -> AbstractContextManager[None]:
        """Within, what is done is another thread's: nothing of the host's comes before it but what it waits for."""
        return self.book.hosts.another()

    @property
    def collectives_begun(self) -> int:
        """How many the group was given until now."""
        assert self.group is not None
        return self.group.stream.clock.get(self.group.stream, 0)

    @property
    def collectives_waited_for(self) -> int:
        """How many of them end before what the current stream does next."""
        assert self.group is not None
        return self.book.stream.clock.get(self.group.stream, 0)

    @property
    def counts(self) -> Counts:
        return self.book.counts

    @property
    def races(self) -> Sequence[str]:
        return self.book.races
