"""What a rank says that may not read another one's memory any more."""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from shardopt.errors import CommunicationError
from shardopt.partition.comm.peer_memory import PeerMemory

PR_SET_DUMPABLE = 4
NOBODY = 65534


def test_a_permission_that_went() -> None:
    """Containers and launchers set PR_SET_DUMPABLE, and some do so late: the peer lives, and is not called dead."""
    if _can_trace_anyone():
        _as_nobody(_read_before_and_after)
    else:
        _read_before_and_after()


def _can_trace_anyone() -> bool:
    return os.geteuid() == 0


def _as_nobody(act: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)  # which clears the flag too
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            act()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def _read_before_and_after() -> None:
    mine = PeerMemory()
    values = torch.arange(10)
    into = torch.zeros(10, dtype=torch.int64)
    from_peer, to_me = os.pipe()
    from_me, to_peer = os.pipe()
    peer = os.fork()
    if not peer:
        os.close(to_peer)
        os.read(from_me, 1)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        os.write(to_me, b"x")
        os.read(from_me, 1)
        os._exit(0)
    try:
        mine.read(peer, values.data_ptr(), into)
        assert torch.equal(into, values)
        os.write(to_peer, b"x")
        os.read(from_peer, 1)
        with pytest.raises(
            CommunicationError, match=f"PR_SET_DUMPABLE and user ids before the first step.*process {peer} lives"
        ):
            mine.read(peer, values.data_ptr(), into)
    finally:
        os.write(to_peer, b"x")
        os.waitpid(peer, 0)
    with pytest.raises(CommunicationError, match=f"process {peer} died"):
        mine.read(peer, values.data_ptr(), into)
