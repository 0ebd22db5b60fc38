"""Reduce-scatter: each rank sums its own slice of a bucket, by one of several mechanisms.

The sum of a rank's own slice is taken in fp32 and in the order of ranks, so that its bits depend on nothing else.
Only a backend's collective (NCCL's) sums in the dtype of the buffer and in an order of its own. The target, which the
sum is added to or replaces, may have a smaller format. It is then rounded once, to nearest, after all terms of this
reduction are added::

    target = round(sum of ranks)               the first reduction of a step
    target = round(target + sum of ranks)      later ones

The buffer of a reduction that was handed to ``start`` belongs to the mechanism, and other ranks may read it, until
``progress``, ``drain`` or ``finish`` returns the reduction; or until ``start`` has encoded what is sent of it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

import torch

PHASE = "reducing gradients"
# Elements summed at a time, 512 KiB in fp32: a chunk that was read from a peer is still in the cache when it is added,
# and a target in a smaller format needs no more fp32 memory than this.
CHUNK = 1 << 17


@dataclass(eq=False)
class Reduction:
    """One bucket to be summed: each rank sums its slice, or all of it if the target is as long as the buffer.

    Sums of the whole bucket take (size - 1) times the buffer from the wire: at 4 ranks twice as much as slices that are
    gathered afterwards. But they need no second exchange, for which no rank could wait in mid-backward.
    """

    buffer: torch.Tensor  # 1D [size * slice_numel], or [slice_numel]: this rank's gradients, any float dtype
    target: torch.Tensor  # 1D [slice_numel], fp32 or a smaller format: receives the sum over ranks of our slice
    add: bool  # adds to the target instead of replacing it
    # Of messages that stand for the buffer, which is empty then; 0 as long as the buffer itself is read.
    nbytes_encoded: int = field(default=0, init=False)

    @property
    def is_whole(self) -> bool:
        """True if every rank's slice is the whole bucket."""
        return self.target.numel() == self.buffer.numel()

    def start_of(self, rank: int) -> int:
        """Returns the start of the rank's slice in the buffer."""
        return 0 if self.is_whole else rank * self.target.numel()

    def runs(self, rank: int) -> list[tuple[int, torch.Tensor]]:
        """Returns what the rank sums where it reads the other ranks' buffers: starts in these, and targets."""
        return [(self.start_of(rank), self.target)]

    def slice_of(self, rank: int) -> torch.Tensor:
        start = self.start_of(rank)
        return self.buffer[start : start + self.target.numel()]

    def messages(self, size: int) -> list[torch.Tensor]:
        """Returns what this rank sends to each of ``size`` ranks, all of one length: their slices as they are."""
        return [self.slice_of(rank) for rank in range(size)]

    def add_up(self, messages: Sequence[torch.Tensor]) -> None:
        """Sums what every rank sent, by rank, into the target."""
        for into, *terms in in_chunks(self.target, *messages):
            sum_into(into, iter(terms), self.add)


class Code(Protocol):
    """The form in which one bucket's gradients travel, where they do not travel as they are."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that stay allocated between reductions."""

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one slice."""

    def encode(self, buffer: torch.Tensor, params: Collection[int] | None) -> list[torch.Tensor]:
        """Returns the message of each slice of the buffer, in order. Params that are not listed are sent as zeros.

        Args:
            params: None: those of which the slice holds something other than zeros.
        """

    def of_sums(self, owners: Sequence[int]) -> "Code":
        """Returns the code of buffers in fp32 that hold these slices alone, in this order."""

    def decode_into(self, target: torch.Tensor, messages: Sequence[torch.Tensor], first: int) -> None:
        """``target = messages[0] + ...``, in this order, from element ``first`` of the slice on; the target is fp32."""


@dataclass(eq=False)
class CodedReduction(Reduction):
    """A reduction whose slices are encoded before they travel, and decoded before they are summed.

    A rank's own slice is encoded as well: ranks that each sum the whole bucket then have the same sums. The buffer is
    free once its messages are made.
    """

    code: Code
    params: Collection[int] | None  # of which this rank has a gradient, see :meth:`Code.encode`

    def messages(self, size: int) -> list[torch.Tensor]:
        found = self.code.encode(self.buffer, self.params)
        sent = found * size if self.is_whole else found
        self.nbytes_encoded = (len(found) + size - 1) * found[0].nbytes  # and what the others send in return
        self.buffer = self.buffer.new_empty(0)
        return sent

    def add_up(self, messages: Sequence[torch.Tensor]) -> None:
        is_direct = self.target.dtype is torch.float32 and not self.add
        # Two messages are decoded in one pass. Of more the sums stay in the cache.
        is_one_pass = is_direct and len(messages) <= 2
        is_whole = is_one_pass or self.target.device.type != "cpu"
        for part in [slice(0, self.target.numel())] if is_whole else chunks(self.target.numel()):
            total = self.target[part] if is_direct else torch.empty_like(self.target[part], dtype=torch.float32)
            self.code.decode_into(total, messages, part.start)
            if not is_direct:
                accumulate(self.target[part], total, self.add)


class Blank(NamedTuple):
    """The size of a reduction for which this rank has no gradients."""

    buffer_numel: int
    target_numel: int
    dtype: torch.dtype  # of the buffer
    device: torch.device


class ReduceScatter(Protocol):
    """Rounds of reductions: every rank starts the same reductions in the same order.

    Attributes:
        notifies_peers: True if ranks that wait for a rank that abandons the round notice it at once.
        on_stream: True if the current stream waits for the sums and the host does not.
        by_messages: True if the host waits for messages, and may do something else meanwhile.
    """

    notifies_peers: bool = False
    on_stream: bool = False
    by_messages: bool = False

    def share(self, dtype: torch.dtype) -> float:
        """Returns the factor by which gradients in buffers of this dtype are multiplied before ``start``.

        The target receives the sum without it.
        """
        return 1.0

    def start_round(self, round_number: int, closure: int = 0) -> None:
        """Begins a round, which is in this closure of a step, counted from 1 on all ranks; 0: in none."""

    def start(self, reduction: Reduction) -> None: ...

    def progress(self) -> list[Reduction]:
        """Goes on as far as is possible without waiting; returns the reductions that have ended."""
        return []

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        """Like ``progress``, but waits until at most ``limit`` reductions are under way, for ``patience`` seconds at
        most.

        :class:`P2PReduceScatter` does not give up: what it waits for has been asked for, and each wait has a deadline.
        """

    def finish(self) -> list[Reduction]:
        """Waits for all reductions; no later call on any rank can disturb them. Returns those that have ended since.

        Raises:
            CommunicationError: a rank died, is late, or abandoned the round.
        """

    def fail_closure(self, closure: int) -> None:
        """Notifies ranks that wait for this rank that its closure raised, where that is possible."""
        return

    def abandon_round(self, round_number: int, rest: Sequence[Blank] | None) -> None:
        """Abandons the round after an error on this rank; notifies the other ranks where that is possible.

        Args:
            rest: the reductions that this rank did not start; None if the other ranks wait for more than those.
        """
        return

    def catch_up(self, round_number: int) -> None:
        """Joins the other ranks before all begin the round again, if they abandoned it and this rank did not."""
        return


class NoReduceScatter(ReduceScatter):
    """For one rank, which owns everything."""

    notifies_peers = True

    def __init__(self) -> None:
        self._done: list[Reduction] = []

    def start_round(self, round_number: int, closure: int = 0) -> None:
        self._done = []

    def start(self, reduction: Reduction) -> None:
        if reduction.target is not reduction.buffer:  # one rank's buffer may be its own target
            accumulate(reduction.target, reduction.buffer, reduction.add)
        self._done.append(reduction)

    def progress(self) -> list[Reduction]:
        done, self._done = self._done, []
        return done

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        return self.progress()

    def finish(self) -> list[Reduction]:
        return self.progress()


@cache
def chunks(numel: int) -> Sequence[slice]:
    """Returns slices of at most CHUNK elements."""
    return [slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK)]


def in_chunks(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Returns chunks of at most CHUNK elements of tensors of one length, 1D; what is no longer as it is."""
    if tensors[0].shape[0] <= CHUNK:  # views take longer than what is done with so few elements
        return [tensors]
    return zip(*(each.split(CHUNK) for each in tensors), strict=True)


def accumulate(target: torch.Tensor, term: torch.Tensor, add: bool, factor: float = 1.0) -> None:
    """``target (+)= factor * term``, in fp32, rounded once to the dtype of the target.

    Args:
        factor: a power of two.
    """
    # If dtypes differ, torch's CPU kernels first widen all elements in memory; a GPU's do it in registers.
    for into, part in in_chunks(target, term) if target.device.type == "cpu" else [(target, term)]:
        if add:
            into.add_(part, alpha=factor)
        else:
            into.copy_(part)
            if factor != 1.0:
                into.mul_(factor)


def sum_into(target: torch.Tensor, terms: Iterator[torch.Tensor], add: bool) -> None:
    """``target (+)= terms[0] + terms[1] + ...``, in this order, in fp32, rounded once to the dtype of the target.

    The sum is made in memory of its own, unless it replaces an fp32 target: callers pass chunks. The next term may
    overwrite a term, but not a first one in fp32 of a sum that is made in the target. Each of the first two may lie
    there itself.
    """
    is_direct = target.dtype is torch.float32 and not add
    total = target if is_direct else torch.empty_like(target, dtype=torch.float32)
    found = next(terms)
    if not is_direct or found.dtype is not torch.float32:
        found = total.copy_(found)
    for term in terms:
        found = torch.add(found, term, out=total)
    if found is not total:  # the only one
        total.copy_(found)
    if not is_direct:
        accumulate(target, total, add)
