"""Ranks of one machine read each other's memory: one copy instead of four through a socket.

Linux lets a process read the memory of a process that it may trace (``process_vm_readv``, cross-memory attach): of the
same user, in the same container, without a stricter security module. Ranks in different PID, mount or network
namespaces count as ranks of different machines, whatever the kernel allows: who sets them apart means them to be. If
one rank cannot read another one, all ranks use messages. On 2 ranks, 134 MiB of params are gathered in 0.4 of the time
of gloo's broadcasts.
"""

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ...errors import CommunicationError

_TOKEN_BYTES = 16
# The kernel moves at most 2 GiB a call, and fewer bytes than asked for are no error.
_BYTES_PER_CALL = 1 << 30


_Vector = ctypes.c_size_t * 2  # struct iovec: address and bytes


class PeerMemory:
    """Finds out whether a peer's memory can be read, and reads it."""

    def __init__(self) -> None:
        # A peer that finds this token at our address knows that it reads us, and not a process of the same number
        # elsewhere.
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)

    def card(self) -> list[int]:
        """Returns what identifies this process: process number, the token's address, the token as two int64, and the
        numbers of its namespaces.
        """
        token = self._token.raw
        halves = [int.from_bytes(token[start : start + 8], "little", signed=True) for start in (0, 8)]
        return [os.getpid(), ctypes.addressof(self._token), *halves, *namespaces()]

    def can_read(self, card: Sequence[int]) -> bool:
        """True if this process may read the peer of this card."""
        pid, address, *halves = card[:4]
        if list(card[4:]) != namespaces():
            return False
        found = ctypes.create_string_buffer(_TOKEN_BYTES)
        expected = b"".join(half.to_bytes(8, "little", signed=True) for half in halves)
        return _read(pid, address, ctypes.addressof(found), _TOKEN_BYTES) == _TOKEN_BYTES and found.raw == expected

    def read(self, pid: int, address: int, into: torch.Tensor) -> None:
        """Fills ``into`` (contiguous) from the memory of process ``pid``.

        Raises:
            CommunicationError: the process died, freed the memory, or may not be read any more.
        """
        done, nbytes = 0, into.numel() * into.element_size()
        while done < nbytes:
            length = min(nbytes - done, _BYTES_PER_CALL)
            count = _read(pid, address + done, into.data_ptr() + done, length)
            if count <= 0:
                reason = os.strerror(ctypes.get_errno())
                if ctypes.get_errno() in (errno.EPERM, errno.EACCES):
                    raise CommunicationError(
                        "set PR_SET_DUMPABLE and user ids before the first step, so that ranks use messages: process "
                        f"{pid} lives, but its memory may not be read any more ({reason}, after {done} of {nbytes} "
                        "bytes)."
                    )
                raise CommunicationError(
                    f"look at the other ranks' output: process {pid} died, or freed its memory while others read it ("
                    f"{reason}, after {done} of {nbytes} bytes). If it ended without an error, it had fewer batches: "
                    "put the loop into `with optimizer.join():`."
                )
            done += count


def namespaces() -> list[int]:
    """Returns the numbers of this process's PID, mount and network namespaces; 0 where the system tells none."""
    found = []
    for name in ("pid", "mnt", "net"):
        try:
            found.append(os.stat(f"/proc/self/ns/{name}").st_ino)
        except OSError:
            found.append(0)
    return found


def _read(pid: int, remote: int, local: int, length: int) -> int:
    call = _process_vm_readv()
    if call is None:
        return -1
    here, there = _Vector(local, length), _Vector(remote, length)
    return int(call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


@cache
def _process_vm_readv() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        vector = ctypes.POINTER(_Vector)
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong]
    return call
