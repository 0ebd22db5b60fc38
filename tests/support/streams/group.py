"""A process group as NCCL's: collectives run on a stream of its own, and a wait makes the current stream wait.

This process is one rank. The other ranks hold what it holds: a sum is this rank's values times the size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardopt.partition.comm import host_group

from .book import Book, span
from .counts import COLLECTIVES
from .record import LINK, Cost
from .stream import Stream


class Work(torch._C._distributed_c10d.Work):
    """A collective under way. It keeps its tensors, as NCCL's does until it is waited for."""

    def __init__(self, book: Book, stream: Stream, tensors: list[Tensor]):
        super().__init__()
        self._book, self._clock, self._tensors = book, dict(stream.clock), tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            self._book.host_waits(self._clock)
        self._book.stream.follow(self._clock)
        self._tensors = []
        return True


class Group(dist.ProcessGroup):
    """Rank 0 of ``size``."""

    def __init__(self, book: Book, size: int):
        super().__init__(0, size)
        self._book, self.stream = book, Stream(book, "the process group's stream")

    def _get_backend(self, device: torch.device) -> "Group":
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def name(self) -> str:
        return "nccl"

    def _run(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> Work:
        strangers = [each for each in (*reads, *writes) if not self._book.is_on_device(each)]
        if strangers:
            raise RuntimeError(f"No backend type associated with device type cpu: {name} of {strangers[0].shape}")
        self.stream.follow(self._book.stream.clock)
        self._book.act(name, map(span, reads), map(span, writes), self.stream, self._cost(name, [*reads, *writes]))
        self._book.counts.note(COLLECTIVES)
        return Work(self._book, self.stream, [*reads, *writes])

    def _cost(self, name: str, tensors: list[Tensor]) -> Cost:
        """Of a ring: what a rank sends, which is what it receives."""
        whole = max(each.nbytes for each in tensors)
        if name == "all_gather":
            whole = max(whole, self.size() * min(each.nbytes for each in tensors))
        share = whole if name == "broadcast" else whole * (self.size() - 1) // self.size()
        return Cost(LINK, 2 * share if name == "all_reduce" else share)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        with _disable_current_modes():
            if options.reduceOp == dist.ReduceOp.SUM:
                tensors[0].mul_(self.size())
        return self._run("all_reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        return self._run("broadcast", tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Work:
        with _disable_current_modes():
            for each in outputs[0]:
                each.copy_(inputs[0])
        return self._run("all_gather", inputs, outputs[0])

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any) -> Work:
        with _disable_current_modes():
            output.view(self.size(), -1).copy_(own.clone().view(1, -1))
        return self._run("all_gather", [own], [output])

    def reduce_scatter_single(self, output: Tensor, own: Tensor, options: Any) -> Work:
        with _disable_current_modes():
            torch.mul(own[: output.numel()], self.size(), out=output)
        return self._run("reduce_scatter", [own], [output])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


class Done(torch._C._distributed_c10d.Work):
    """What gloo has carried between hosts."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Beside(dist.ProcessGroup):
    """The group beside it that carries host memory, as gloo's: no stream has anything to do with it."""

    def __init__(self, size: int):
        super().__init__(0, size)
        self._awaited: dict[int, list[Tensor]] = {}  # by tag

    def allreduce(self, tensors: list[Tensor], options: Any) -> Done:
        tensors[0].mul_(self.size())
        return Done()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Done:
        return Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Done:
        for each in outputs[0]:
            each.copy_(inputs[0])
        return Done()

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any) -> Done:
        output.view(self.size(), -1).copy_(own.view(1, -1))
        return Done()

    def all_to_all_single(self, output: Tensor, own: Tensor, output_sizes: Any, own_sizes: Any, options: Any) -> Done:
        output.copy_(own)
        return Done()

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Done:
        self._awaited.setdefault(tag, []).append(tensors[0])
        return Done()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Done:
        for each in self._awaited.pop(tag, ()):
            each.copy_(tensors[0])
        return Done()


@contextmanager
def beside() -> Iterator[None]:
    """Within, hosts of a machine's group tell each other what one of them tells."""
    with patch.object(host_group, "_gloo_beside", lambda group: Beside(group.size())):
        yield
