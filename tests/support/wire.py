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
from dataclasses import dataclass
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
    """Bytes that this rank received from others, and sent to them."""

    received: int = 0
    sent: int = 0


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
    moved.received, moved.sent = (now - then for now, then in zip(_tcp_bytes(), before, strict=True))
    everyones: list[Counter[int]] = [Counter()] * dist.get_world_size()
    dist.all_gather_object(everyones, read)
    moved.received += read.total()
    moved.sent += sum(each[os.getpid()] for each in everyones)


def _tcp_bytes() -> tuple[int, int]:
    """Received and sent so far by all TCP connections that this process has open."""
    received = sent = 0
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
                received += struct.unpack_from("<Q", info, _RECEIVED)[0]
                all_sent, sent_again = struct.unpack_from("<QQ", info, _SENT)
                sent += all_sent - sent_again
    return received, sent


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
