"""A group of ranks: the few collectives that an optimizer needs, chosen by backend, each wait with a deadline.

Tensors of a GPU travel by the backend of the group, and what lies in host memory by :mod:`.host_group`.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ...errors import CommunicationError, DisagreementError
from ...gpu_stream import current_stream
from . import collectives
from .ended import ended_ranks
from .host_group import backend_of, host_group, timeout_of
from .messages import WAITS, AskingGather, book_of
from .notes import note_of
from .patience import await_news_of_readers, is_read_alone, wait_for_collective, wait_for_message
from .tags import NEVER_SENT

# Longest description that ranks exchange to find where they differ. A longer one that a peer announces is refused
# before memory is allocated for it.
MAX_MESSAGE_BYTES = 256 << 20

# The messages of some backends end with one of these: removed, as more text follows.
_MARKS = ".! \n"

# Seconds between two queries of a CUDA event, while the host waits for it. Without a pause the host would hold the core
# that NCCL's proxy thread or another rank needs.
_PAUSE = 50e-6

_CPU = torch.device("cpu")


class _Unfinished(list[str]):
    """The phases of exchanges that did not finish. A backend may match the messages of one with later ones."""


class Pending(NamedTuple):
    """A collective under way: its phase (for messages), and the works to wait for."""

    phase: str
    works: tuple[Any, ...]
    peers: tuple[int, ...] = ()  # by work: its rank, if each work is with one rank
    is_on_host: bool = False  # of host memory
    tag: int | None = None  # of messages
    asking: AskingGather | None = None  # by these messages


@dataclass
class Traffic:
    """Bytes that this rank received from others, by kind. The few bytes of agreements do not count."""

    params: int = 0
    gradients: int = 0
    states: int = 0  # slices that were gathered for reading
    matrices: int = 0  # slices of updates, to the rank where a matrix is made whole, and back


class Ranks:
    """The ranks that share states. Without a process group, or with one rank, all calls return at once."""

    def __init__(self, group: dist.ProcessGroup | None, deadline: timedelta | None):
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.size = group.size() if group is not None else 1
        self.rank = group.rank() if group is not None else 0
        self._deadline = deadline
        self._broken: list[str] = [] if group is None else note_of(group, _Unfinished)

    @staticmethod
    def alone() -> "Ranks":
        """Returns a group of this rank alone, whatever process groups there are."""
        ranks = Ranks.__new__(Ranks)
        ranks.group, ranks.size, ranks.rank, ranks._deadline, ranks._broken = None, 1, 0, None, []
        return ranks

    @cached_property
    def host(self) -> dist.ProcessGroup:
        """The group that carries host memory, see :func:`.host_group.host_group`."""
        assert self.group is not None
        return host_group(self.group)

    def carries(self, device: torch.device) -> bool:
        """True if the group moves tensors of this device. gloo's backend for CUDA does not count: it is slow."""
        return self.group is None or device.type == "cpu" or self._backend(device) not in (None, "gloo")

    @property
    def seconds(self) -> float:
        """The longest time that one wait for another rank may take."""
        if self._deadline is not None:
            return self._deadline.total_seconds()
        return (default_pg_timeout if self.group is None else timeout_of(self.group)).total_seconds()

    def is_read_alone(self, since: float) -> bool:
        """True if some rank has said since then that it reads alone: a wait for it goes on."""
        return is_read_alone(self.group, since)

    def has_collectives(self, device: torch.device) -> bool:
        """True if the backend's own reduce-scatter and all-gather are fast: those of any backend but gloo."""
        return self.group is not None and self._backend(device) not in (None, "gloo")

    def takes_priority(self, device: torch.device) -> bool:
        """True if NCCL's streams have the device's greatest priority, as its options or the environment may say."""
        options = None if self.group is None else getattr(backend_of(self.group, device), "options", None)
        forced = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "").lower() in ("1", "y", "yes", "t", "true")
        return forced or bool(getattr(options, "is_high_priority_stream", False))

    def _backend(self, device: torch.device) -> str | None:
        backend = None if self.group is None else backend_of(self.group, device)
        return None if backend is None else str(backend.name()).lower()

    def _route(self, device: torch.device) -> tuple[dist.ProcessGroup, torch.device]:
        """Returns the group that carries tensors of this device, and the device that they must be on."""
        if device.type != "cpu" and self.carries(device):
            assert self.group is not None
            return self.group, device
        return self.host, _CPU

    def wait(
        self, pending: Pending, limit: timedelta | None = None, absent: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """Waits until the collective is done.

        Args:
            limit: of this wait, where the user set no deadline and the process group's own is longer.
            absent: returns the ranks that did not come, once the wait has failed.

        Raises:
            CommunicationError: a peer died or is late.
            DisagreementError: other ranks completed an evaluation's messages with anything: they run apart.
        """
        deadline = self._deadline
        if deadline is None and limit is not None and (limit.total_seconds() < self.seconds or pending.asking):
            deadline = min(limit, timedelta(seconds=self.seconds))
        group, thread, peer = self.host if pending.is_on_host else self.group, threading.get_ident(), None
        try:
            self.check_usable(pending.phase)
            if group is not None:
                WAITS[thread] = group, pending.tag, pending.phase, None
            for work, peer in itertools.zip_longest(pending.works, pending.peers):
                if deadline is None or group is None:
                    work.wait()
                elif pending.is_on_host and peer is not None:
                    wait_for_message(work, deadline, group, peer, pending.asking)
                else:
                    wait_for_collective(work, deadline, group)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise self._named(error, pending.phase, *(absent() if peer is None else [peer])) from error
        finally:
            WAITS.pop(thread, None)
            if pending.asking is not None:
                pending.asking.forget()
        if pending.asking is not None and pending.asking.verdict is not None:
            raise DisagreementError(pending.asking.verdict)

    def wait_on_stream(self, pending: Pending) -> None:
        """Lets the current stream wait until the collective is done; the host goes on.

        Never with the user's deadline: the host would then poll for the end of the collective in every forward and
        backward (test_deadlines_do_not_make_the_host_wait). NCCL ends what takes longer than the group's own timeout.

        Raises:
            CommunicationError: a peer died.
        """
        for work in pending.works:
            self.check_usable(pending.phase)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._named(error, pending.phase) from error

    def read(self, vector: torch.Tensor, phase: str) -> torch.Tensor:
        """Returns what collectives left on a GPU, in host memory. Every rank has issued them: see :mod:`.roll_call`.

        Raises:
            CommunicationError: they do not end, as a rank died in the middle of them.
        """
        # Pinned: a copy to other memory is a wait of its own, without a deadline.
        host = torch.empty_like(vector, device="cpu", pin_memory=True)
        host.copy_(vector, non_blocking=True)
        self.wait_for_stream(vector.device, phase)
        return host

    def wait_for_stream(self, device: torch.device, phase: str) -> None:
        """Waits until the current stream of a GPU has ended all work that was queued, collectives included.

        Raises:
            CommunicationError: they do not end.
        """
        reached = torch.cuda.Event()
        reached.record(current_stream(device))
        self.wait_for_device(reached.query, phase)

    def wait_for_device(self, is_done: Callable[[], bool], phase: str) -> None:
        """Waits until ``is_done()``, which is true once a device has ended collectives.

        Raises:
            CommunicationError: they do not end, or failed.
        """
        end = time.monotonic() + self.seconds
        while True:
            with self.naming(phase):
                if is_done():
                    return
            if time.monotonic() > end:
                self.give_up(phase)
                raise CommunicationError(
                    "restart the ranks from a checkpoint, and look at the other ranks' output: what every rank had "
                    f"issued did not end within {self.seconds:g} s, {self.at(phase)}. A rank died meanwhile, or its "
                    "connection broke."
                )
            time.sleep(_PAUSE)

    def begin(
        self, phase: str, collective: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **keywords: Any
    ) -> Pending:
        """Starts a collective of a tensor over the group that carries it; ``collective`` returns its work."""
        self.check_usable(phase)
        try:
            group, device = self._route(tensor.device)
            work = collective(tensor, *arguments, **keywords, group=group)
            return Pending(phase, (work,), is_on_host=device.type == "cpu")
        except RuntimeError as error:
            raise self._named(error, phase) from error

    def _finish(self, phase: str, *collective: Any, **keywords: Any) -> None:
        self.wait(self.begin(phase, *collective, **keywords))

    def exchange(self, row: Sequence[int], phase: str) -> list[list[int]]:
        """Collective: returns every rank's row of int64, by rank. Rows have one length; empty rows are a barrier."""
        return self.begin_exchange(row, phase)()

    def begin_exchange(self, row: Sequence[int], phase: str) -> Callable[[], list[list[int]]]:
        """Collective: sends this rank's row like :meth:`exchange`. Returns the call that waits for the others'."""
        if self.size == 1:
            return lambda: [list(row)]
        length = len(row)
        mine = torch.tensor([length, *row], dtype=torch.int64)
        rows = mine.new_empty(self.size * (length + 1))
        # Into one tensor: torch looks at each of a list, which grows with the ranks.
        pending = self.begin(phase, collectives.all_gather, rows, mine)

        def end() -> list[list[int]]:
            self.wait(pending)
            found = rows.view(self.size, -1).tolist()
            lengths = [each for each, *_ in found]
            if lengths.count(length) < self.size:
                raise DisagreementError(
                    "run the same forwards, backwards and steps on every rank: the ranks are not at the same call, as "
                    f"{self.at(phase)}, they sent rows of {lengths} numbers."
                )
            return [values for _, *values in found]

        return end

    def barrier(self, failed: bool, phase: str) -> None:
        """Collective: raises CommunicationError on every rank if one failed."""
        reports = self.exchange([int(failed)], phase)
        if [1] in reports:
            raise CommunicationError(f"while {phase}: rank {reports.index([1])} could not go on.")

    def exchange_json(self, value: Any, phase: str) -> list[Any]:
        """Collective: returns every rank's JSON-able value, by rank. Nothing that a peer sends is unpickled."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        message = json.dumps(value).encode()
        lengths = [length for (length,) in self.exchange([len(message)], phase)]
        if max(lengths) > MAX_MESSAGE_BYTES:
            raise DisagreementError(
                "run the same program on every rank: a message was refused. "
                f"While {phase}: rank {lengths.index(max(lengths))} announced a message of {max(lengths)} bytes, above "
                f"the {MAX_MESSAGE_BYTES} that are accepted."
            )
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        others = padded.new_empty(self.size * len(padded))
        self._finish(phase, collectives.all_gather, others, padded)
        pairs = zip(others.split(len(padded)), lengths, strict=True)
        return [json.loads(bytes(other[:length].numpy())) for other, length in pairs]

    def all_reduce(self, vector: torch.Tensor, phase: str) -> None:
        """Collective: sums every rank's tensor over the ranks, in place."""
        if self.size == 1:
            return
        message = vector.to(self._route(vector.device)[1])
        self._finish(phase, collectives.all_reduce, message)
        if message is not vector:
            vector.copy_(message)

    def exchange_slices(
        self,
        own: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        tag: int,
        phase: str,
        members: Sequence[int] | None = None,
    ) -> Pending:
        """Starts to send ``own[i]`` to rank ``i`` and to receive ``others[i]`` from it, by messages of this tag.

        Args:
            members: the ranks that exchange them, this one included, in the order of the tensors; None: all.
        """
        members = range(self.size) if members is None else members
        size, at = len(members), members.index(self.rank)
        numbers = [(at + step) % size for step in range(1, size)]
        peers = [members[number] for number in numbers]
        works, peer = [], None
        self.check_usable(phase)
        try:
            group, device = self._route(own[0].device)
            for number, peer in zip(numbers, peers, strict=True):
                works.append(dist.irecv(others[number], group_src=peer, group=group, tag=tag))
            for number, peer in zip(numbers, peers, strict=True):
                works.append(dist.isend(own[number], group_dst=peer, group=group, tag=tag))
        except RuntimeError as error:
            raise self._named(error, phase, *(() if peer is None else [peer])) from error
        if device.type == "cpu":
            book_of(group).note(tag, len(works))
        return Pending(phase, tuple(works), (*peers, *peers), device.type == "cpu", tag)

    def asking(self, pending: Pending, nbytes: int, trains: bool) -> Pending:
        """Returns messages to all ranks, of this size each, as those of a gather that asks; see :mod:`.messages`."""
        if not pending.is_on_host or self.group is None:
            return pending
        book, tag = book_of(host_group(self.group)), pending.tag
        assert tag is not None
        return pending._replace(asking=AskingGather(book, pending.phase, tag, pending.peers, nbytes, trains))

    def broadcast(self, tensors: Sequence[torch.Tensor], phase: str, root: int = 0) -> None:
        """Collective: copies the root's values into every rank's tensors, one after the other."""
        if self.size == 1:
            return
        for tensor in tensors:
            message = tensor.detach().to(self._route(tensor.device)[1]).contiguous()
            self._finish(phase, dist.broadcast, as_bytes(message), group_src=root, async_op=True)
            if message.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(message)

    def broadcast_on_stream(self, tensor: torch.Tensor, phase: str, root: int) -> None:
        """Collective: copies the root's values into every rank's contiguous tensor. On a GPU its stream waits for them,
        and the host does not."""
        if self.size == 1:
            return
        message = tensor.to(self._route(tensor.device)[1])
        self.begin_broadcast(message, phase, root)()
        if message is not tensor:
            tensor.copy_(message)

    def begin_broadcast(self, tensor: torch.Tensor, phase: str, root: int) -> Callable[[], None]:
        """Collective: starts to copy the root's values into every rank's contiguous tensor, on a device that the group
        carries. Returns the call that waits for them; on a GPU its stream does."""
        if self.size == 1:
            return lambda: None
        pending = self.begin(phase, dist.broadcast, as_bytes(tensor), group_src=root, async_op=True)
        return partial(self.wait if tensor.device.type == "cpu" else self.wait_on_stream, pending)

    def gather(self, own: torch.Tensor, to: int, phase: str) -> list[torch.Tensor] | None:
        """Collective: returns every rank's tensor (same shape and dtype), by rank, on rank ``to``; None elsewhere."""
        if self.size == 1:
            return [own]
        own = own.to(self._route(own.device)[1]).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == to else None
        # Not by messages: NCCL makes a communicator, and keeps its buffers, for each pair of ranks that sends one.
        # Test: test_consolidating_sends_no_messages in tests/states/test_state_dict.py.
        self._finish(phase, dist.gather, own, parts, group_dst=to, async_op=True)
        return parts

    def give_up(self, phase: str) -> None:
        """Records that no rank may use the group any more, as an exchange did not finish."""
        self._broken.append(phase)

    def lost(self, peers: Sequence[int]) -> list[int]:
        """Returns those of these ranks whose connection has ended. A wait has failed: the group is not used again."""
        found = []
        for peer in peers:
            try:
                dist.irecv(torch.empty(1), group_src=peer, group=self.host, tag=NEVER_SENT)
            except RuntimeError:
                found.append(peer)
        return found

    def at(self, phase: str) -> str:
        return f"while {phase}, on rank {self.rank} of {self.size}"

    def check_usable(self, phase: str) -> None:
        """Raises CommunicationError if an earlier exchange of this group did not finish."""
        if self._broken:
            raise CommunicationError(
                "restart the ranks from a checkpoint, or construct the optimizer with a new process group: an earlier "
                f"exchange in this group did not finish ({self._broken[-1]}), and a new message could be taken for "
                f"one of the earlier exchange, {self.at(phase)}."
            )

    @contextmanager
    def naming(self, phase: str) -> Iterator[None]:
        """Within it, an error of the backend is raised as a CommunicationError that names the phase."""
        self.check_usable(phase)
        try:
            yield
        except (CommunicationError, DisagreementError):
            raise
        except RuntimeError as error:
            raise self._named(error, phase) from error

    def _named(self, error: RuntimeError, phase: str, *peers: int) -> CommunicationError:
        """Returns what to raise in place of an error of the backend. No rank may use the group any more.

        Args:
            peers: those that are to blame, if they are known.
        """
        phase = f"{phase} (with rank {', '.join(map(str, peers))})" if peers else phase
        self.give_up(phase)
        await_news_of_readers(self.group)
        gone = ended_ranks(self.group)
        found = f"{_look_at(gone) if gone else ''}{self.at(phase)}: {str(error).rstrip(_MARKS)}"
        return CommunicationError(
            f"{found}. A peer died, left, or did not make the same call in time: every rank must call step(), "
            "save_checkpoint() and the like. Look at the other ranks' output for the first error."
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: backends carry no float8, and NCCL no 16-bit integers."""
    return tensor.detach().view(-1).view(torch.uint8)


def _look_at(ended: Sequence[int]) -> str:
    """The beginning of an error whose cause is that ranks have ended."""
    ranks = ", ".join(map(str, ended))
    return f"look at the output of rank {ranks}, whose process has ended: this rank waited for it in vain, "
