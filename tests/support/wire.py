"""What ranks tell each other, seen from outside: bytes by the system's count, calls by torch's dispatcher.

No name of the package's transports is used but one: the call that reads another process's memory, which no counter of
the system shows. A test that counts should also say the least that must have moved, so that a path which the counters
do not see shows as well.
"""

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardopt.partition.comm import peer_memory as neighbours

# Where struct tcp_info (linux/tcp.h) has tcpi_bytes_received, and tcpi_bytes_sent with tcpi_bytes_retrans behind it.
_RECEIVED, _SENT = 128, 200
# Waiting for a neighbour is reading its notice board, half a KiB, as often as time allows: that is not counted.
_BOARD = 1000


@dataclass
class Moved:
    """Bytes that this rank received from others, and sent to them; ``by_rank``: those received from each."""

    received: int = 0
    sent: int = 0
    by_rank: Counter[int] = field(default_factory=Counter)


@contextmanager
def counting() -> Iterator[Moved]:
    """Collective. Yields what is filled in at the end: all that ranks moved within, agreements included."""
    moved = Moved()
    read: Counter[int] = Counter()  # bytes, by process
    read_memory = neighbours._read

    def counted(pid: int, remote: int, local: int, length: int) -> int:
        count = read_memory(pid, remote, local, length)
        read[pid] += count * (count > _BOARD)
        return count

    dist.barrier()
    before = _tcp_bytes()
    with patch.object(neighbours, "_read", counted):
        yield moved
    dist.barrier()
    after = _tcp_bytes()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (os.getpid(), read, [*after]))
    other_ends = {each[::-1]: rank for rank, (_, _, connections) in enumerate(everyones) for each in connections}
    for connection, (received, sent) in after.items():
        earlier = before.get(connection, (0, 0))
        moved.sent += sent - earlier[1]
        moved.by_rank[other_ends.get(connection, -1)] += received - earlier[0]
    for rank, (pid, reads, _) in enumerate(everyones):
        moved.by_rank[rank] += read[pid]
        moved.sent += reads[os.getpid()]
    moved.received = moved.by_rank.total()


Connection = tuple[tuple[str, int], tuple[str, int]]  # host and port of this end, and of the other one


def _tcp_bytes() -> dict[Connection, tuple[int, int]]:
    """Received and sent so far by each TCP connection that this process has open."""
    found: dict[Connection, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (received,) = struct.unpack_from("<Q", info, _RECEIVED)
                all_sent, sent_again = struct.unpack_from("<QQ", info, _SENT)
                try:
                    ends = connection.getsockname()[:2], connection.getpeername()[:2]
                except OSError:  # listens, or has ended
                    continue
                found[ends] = received, all_sent - sent_again
    return found


class Calls(TorchDispatchMode):
    """Counts the calls of process groups by this thread, whoever makes them, DDP's C++ code included.

    ``found`` is by name: "allreduce_", "allgather_", "send", "recv_" and so on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.found[function.name().removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))
