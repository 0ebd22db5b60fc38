"""All-to-all: every rank sends every other rank a tensor of its own, of any length. One mechanism for each connection.

::

    rank 0 sends   . a b      receives   . c e          . stays where it is
    rank 1         c . d                 a . f
    rank 2         e f .                 b d .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...errors import DisagreementError
from .group import Pending
from .together import riding_on, together

if TYPE_CHECKING:
    from .group import Ranks
    from .peer_memory import PeerMemory

# Takes the tensors to send and those to fill, both by rank, and the addresses that each rank has sent, by rank. Starts
# the exchange, and returns the call that waits for its end.
Begin = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[Sequence[int]]], Callable[[], None]]


class AllToAll:
    """Exchanges tensors with all other ranks; one of the functions below makes it. One exchange at a time."""

    def __init__(self, ranks: Ranks, begin: Begin, sends_addresses: bool = False):
        self._ranks, self._begin, self._sends_addresses = ranks, begin, sends_addresses

    def start(
        self,
        own: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        phase: str,
        failed: bool = False,
        key: int = 0,
    ) -> Callable[[], None]:
        """Collective: starts to send ``own[r]`` to each rank r, and to fill ``others[r]`` from it.

        Args:
            own: 1D, by rank; not to be written until the returned call has ended.
            others: 1D of the same dtype, by rank, as long as what that rank sends.
            failed: True if this rank met an error and sends nothing: every rank raises.
            key: what must be equal on all ranks, in 63 bits.

        Returns:
            The call, collective too, that waits until everything has arrived on every rank.

        Raises:
            DisagreementError: a rank failed, or has another key.
            CommunicationError: a rank died or is late.
        """
        ranks = self._ranks
        addresses = [each.data_ptr() for each in own] if self._sends_addresses and not failed else [0] * ranks.size
        rows = ranks.exchange([int(failed), key, *addresses], phase)
        _check([row[0] for row in rows], phase)
        if any(row[1] != key for row in rows):
            raise DisagreementError(
                f"give the same params a gradient on all ranks: while {phase}, the ranks had other params to update. "
                "Slices of different matrices would have been put together."
            )
        end = self._begin(own, others, [row[2:] for row in rows])
        return partial(self._finish, end, list(own), phase)

    def _finish(self, end: Callable[[], None], kept: list[torch.Tensor], phase: str) -> None:
        """Collective: waits until everything has arrived on every rank.

        Args:
            kept: the tensors that this rank sends. Other ranks read them until the exchange below. Without a reference
                the allocator could give their memory to another tensor, and peers would read that one's values.
        """

        def tell(failed: bool) -> None:
            reports = self._ranks.exchange([int(failed)], f"{phase} (waiting for every rank)")
            kept.clear()
            _check([failed for (failed,) in reports], phase)

        with together(riding_on(tell)):
            end()


def _check(reports: Sequence[int], phase: str) -> None:
    if any(reports):
        failed = list(map(bool, reports)).index(True)
        raise DisagreementError(
            f"look at the output of rank {failed} for its error: while {phase}, it could not go on, and sent nothing."
        )


def to_itself(ranks: Ranks) -> AllToAll:
    """One rank, which has everything already."""
    return AllToAll(ranks, lambda own, others, _: lambda: None)


def by_messages(ranks: Ranks, tag: int, phase: str) -> AllToAll:
    """Sends straight to every rank, while this rank computes."""
    return AllToAll(ranks, lambda own, others, _: partial(ranks.wait, ranks.exchange_slices(own, others, tag, phase)))


def by_reading(ranks: Ranks, memory: PeerMemory, pids: Sequence[int]) -> AllToAll:
    """Reads what each rank has for this one from its memory."""

    def end(others: Sequence[torch.Tensor], addresses: Sequence[Sequence[int]]) -> None:
        for step in range(1, ranks.size):  # every rank starts with another peer
            peer = (ranks.rank + step) % ranks.size
            memory.read(pids[peer], addresses[peer][ranks.rank], others[peer])

    return AllToAll(ranks, lambda _, others, addresses: partial(end, others, addresses), sends_addresses=True)


def by_collectives(ranks: Ranks, phase: str) -> AllToAll:
    """The backend's all-to-all. NCCL runs it on its own stream, and the current stream waits for it."""

    def begin(own: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Callable[[], None]:
        with ranks.naming(phase):
            work = dist.all_to_all(list(others), list(own), group=ranks.group, async_op=True)
        return partial(ranks.wait_on_stream, Pending(phase, (work,)))

    return AllToAll(ranks, lambda own, others, _: begin(own, others))
