"""Ranks that run apart: a rank in a gather that others may not run asks them, after a while, where they are.

It waits for a gather that a rank has not begun, and that rank for a call that this one has not begun: neither would
come (:mod:`shardopt.partition.comm.messages`). Once that holds of all ranks that it waits for, these complete its
gathers by a thread, with zeros that nobody sees, and its forward ends in an error. They themselves notice nothing::

    rank 0   evaluates: gather ... where are you? ... complete it! ...  error       time ->
    rank 1   barrier() ............................................................
             thread               in barrier()       zeros

A gather that trains is one of a unit that no schedule has, as no rank used it in the steps before. Ranks that do not
use it now either complete it with their slices, which do not change while this rank waits: its forward goes on.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..partition.comm.ended import note_unsent
from ..partition.comm.host_group import host_group
from ..partition.comm.messages import WAITS, book_of, collectives_in
from ..partition.comm.tags import GatherKind

if TYPE_CHECKING:
    from ..partition.comm.messages import AskingGather

# Calls of torch that wait for all ranks of a group.
_COLLECTIVES = re.compile(
    r"(all_gather|all_reduce|all_to_all|(monitored_)?barrier|broadcast|gather|reduce|scatter)"
    r"(_scatter|_object|_object_list|_into_tensor|_tensor|_single)*"
)
_ANSWER = 10.0  # seconds that one answer may take
_FILE = os.path.join(os.path.dirname(dist.__file__), "distributed_c10d.py")


class Wait(NamedTuple):
    """What a thread waits for: a message, or a collective, of one of the groups that ranks share."""

    group: int  # its place among them
    tag: int | None  # of a message; None: a collective
    number: int
    name: str  # for people


def wait_of(thread: int, groups: Sequence[dist.ProcessGroup]) -> Wait | None:
    """Returns what a thread of this process waits for; None if it waits for no rank of these groups."""
    waits = WAITS.get(thread)
    if waits is not None:
        group, tag, phase, number = waits
        if group not in groups:
            return None
        if number is None:
            number = collectives_in(group) if tag is None else book_of(group).counts[tag]
        return Wait(groups.index(group), tag, number, phase)
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FILE and _COLLECTIVES.fullmatch(code.co_name):
            given = frame.f_locals.get("group") or dist.group.WORLD
            if not isinstance(given, dist.ProcessGroup) or given not in groups:  # to make one beside it is collective
                return None
            group = host_group(given)
            return Wait(groups.index(group), None, collectives_in(group), f"{code.co_name}()")
        frame = frame.f_back
    return None


class Apart:
    """The ranks of one optimizer, as one that waits for the others in a gather asks them where they are."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        groups: Sequence[dist.ProcessGroup],
        connect: Callable[[int], connection.Connection[Any, Any]],
        trainer: Callable[[], int],
        message_of: Callable[[int, int], torch.Tensor | None],
    ):
        """
        Args:
            group: of the ranks, by whose numbers ``connect`` knows them.
            groups: in which they wait for each other, in one order on all of them.
            trainer: returns the thread that trains; 0: the main thread.
            message_of: see :meth:`shardopt.domain.sharded_params.ShardedParams.message_of`.
        """
        self._message_of = message_of
        self._group, self._groups, self._connect = host_group(group), groups, connect
        self._trainer = trainer
        book_of(self._group).inquirers.append(self.inquire)

    def retire(self) -> None:
        """Asks no more: the optimizer is done."""
        with suppress(ValueError):
            book_of(self._group).inquirers.remove(self.inquire)

    # -- the rank that asks ----------------------------------------------------------------------------------------

    def inquire(self, gather: AskingGather) -> bool:
        """Asks the ranks that this one waits for. If they run apart, they complete its gathers.

        Returns:
            False: they do not complete it for this optimizer.
        """
        with suppress(OSError, EOFError, ValueError, KeyError):  # a rank that is gone is noticed by who waits for it
            return self._inquire(gather)
        return False

    def _inquire(self, gather: AskingGather) -> bool:
        waiting: dict[int, Wait] = {}
        for rank in gather.peers:
            has_begun, wait = self._ask(rank, {"where": self._facts([gather], rank)})
            if has_begun:
                continue
            if wait is None or self._has_begun(Wait(*wait), rank):
                return True  # it may come yet
            waiting[rank] = Wait(*wait)
        if not waiting:
            return True
        under_way = [each for each in book_of(self._group).asking.values() if each.trains == gather.trains]
        for each in under_way if not gather.trains else ():  # first: what completes them is not their values
            each.verdict = self._verdict(gather, waiting)
        do_complete = any([self._may_complete(under_way, rank, wait) for rank, wait in waiting.items()])
        for each in under_way if not do_complete else ():
            each.verdict = None
        return do_complete

    def _may_complete(self, gathers: Sequence[AskingGather], rank: int, wait: Wait) -> bool:
        """Asks a rank to complete gathers. Returns False only if it says that it does not: else zeros may come."""
        try:
            return bool(self._ask(rank, {"complete": self._facts(gathers, rank), "while": wait}))
        except (OSError, EOFError, ValueError):
            return True

    def _ask(self, rank: int, request: dict[str, Any]) -> Any:
        with self._connect(rank) as peer:
            peer.send_bytes(json.dumps(request).encode())
            if not peer.poll(_ANSWER):
                raise TimeoutError("no answer")
            return json.loads(peer.recv_bytes(1 << 16))

    def _facts(self, gathers: Sequence[AskingGather], rank: int) -> list[Any]:
        place, book = self._groups.index(self._group), book_of(self._group)
        facts = [[each.tag, each.number + book.completed[each.tag, rank], each.nbytes] for each in gathers]
        return [place, self._group.rank(), facts]

    def _has_begun(self, wait: Wait, rank: int) -> bool:
        group = self._groups[wait.group]
        begun = collectives_in(group) if wait.tag is None else book_of(group).begun_with(wait.tag, rank)
        return begun >= wait.number

    def _verdict(self, gather: AskingGather, waiting: dict[int, Wait]) -> str:
        rank, wait = min(waiting.items())
        where = f"on rank {self._group.rank()} of {self._group.size()}"
        return (
            "put what one rank does (`if rank == 0: evaluate()`) in `with optimizer.unsharded(alone=True):`, and what "
            "ranks do at other lengths in `with optimizer.unsharded():`. While "
            f"{gather.phase} to evaluate, {where}: rank {rank} does not evaluate, and waits for this one elsewhere "
            f"({wait.name}). Nothing has changed: make that call on this rank too, and all go on."
        )

    # -- the others ------------------------------------------------------------------------------------------------

    def answer(self, request: dict[str, Any]) -> Any:
        """Answers a rank that asks."""
        place, rank, gathers = request["where"] if "where" in request else request["complete"]
        group = self._groups[int(place)]
        book, wait = book_of(group), wait_of(self._trainer() or threading.main_thread().ident or 0, self._groups)
        if wait is not None and wait.tag is not None:  # with what this rank completed and did not run
            completed = book_of(self._groups[wait.group]).completed[wait.tag, rank]
            wait = wait._replace(number=wait.number + completed)
        lacking = [each for each in gathers if book.begun_with(each[0], rank) < each[1]]
        if "where" in request:
            return [not lacking, wait]
        if wait is None or list(wait) != request["while"]:
            return False
        messages = [self._message(tag, nbytes) for tag, _, nbytes in lacking]
        if any(each is None for each in messages):
            return False
        works = []
        for (tag, _, nbytes), message in zip(lacking, messages, strict=True):
            assert message is not None
            book.completed[tag, rank] += 1
            book.messages += 2
            note_unsent(group, 2 * (group.size() - 2))
            works.append(dist.irecv(torch.empty(nbytes, dtype=torch.uint8), group_src=rank, group=group, tag=tag))
            works.append(dist.isend(message, group_dst=rank, group=group, tag=tag))
        for each in works:
            assert each is not None
            each.wait()
        return True

    def _message(self, tag: int, nbytes: int) -> torch.Tensor | None:
        """Returns what completes another rank's gather: zeros for one that evaluates, else this rank's slice."""
        kind, window = GatherKind.of_tag(tag)
        is_zeros = kind is GatherKind.EVALUATION
        return torch.zeros(nbytes, dtype=torch.uint8) if is_zeros else self._message_of(window, nbytes)
