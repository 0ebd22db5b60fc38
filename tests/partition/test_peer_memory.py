"""Ranks that may not read each other's memory: in other namespaces, or not any more."""

import ctypes
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedSGD
from shardopt.errors import CommunicationError
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.peer_memory import PeerMemory
from shardopt.partition.comm.transport import Transport
from tests.support.ranks import Pool
from tests.support.training import raises

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


CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWPID = 0x00020000, 0x40000000, 0x20000000


def card_of_a_child(kind: int) -> tuple[list[int], Callable[[], None]]:
    """Returns the card of a process that lives in a namespace of its own, as numbered here, and the call that ends it.

    The card is empty where that is not allowed.
    """
    to_parent, from_child = os.pipe()[::-1]
    until, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        with suppress(BaseException):
            if kind == 0 or ctypes.CDLL(None).unshare(kind) == 0:
                inner = os.fork() if kind == CLONE_NEWPID else 0  # only children are in the new PID namespace
                if not inner:
                    own = PeerMemory()  # as long as it is read
                    os.write(to_parent, json.dumps(own.card()).encode())
                os.read(until, 1)
        os._exit(0)
    os.close(to_parent)
    told = os.read(from_child, 4096)

    def end() -> None:
        os.close(ends)
        os.waitpid(child, 0)

    return json.loads(told or b"[]"), end


@pytest.mark.parametrize(
    ("kind", "is_near"), [(0, True), (CLONE_NEWNS, False), (CLONE_NEWNET, False), (CLONE_NEWPID, False)]
)
def test_processes_of_other_namespaces_are_not_read(kind: int, is_near: bool) -> None:
    card, end = card_of_a_child(kind)
    try:
        if not card:
            pytest.skip(f"unshare({kind:#x}) is not allowed here")
        assert PeerMemory().can_read(card) is is_near
    finally:
        end()


def trains_apart() -> bool:
    """Returns False where no namespace may be made. Connections that are open stay."""
    libc, rank = ctypes.CDLL(None), dist.get_rank()
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    allowed = torch.tensor([int(rank != 1 or libc.unshare(CLONE_NEWNET) == 0)])
    try:
        dist.all_reduce(allowed, dist.ReduceOp.MIN)
        if allowed.item():
            trains("messages")
    finally:
        if rank == 1 and allowed.item():
            assert libc.setns(before, CLONE_NEWNET) == 0
        os.close(before)
    return bool(allowed.item())


def trains(transport: str) -> None:
    model = nn.Linear(8, 8)
    opt = ShardedSGD(model, lr=0.1, stage=2)
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    assert f"transport={transport})" in repr(opt), repr(opt)
    opt.close()


def test_a_network_namespace_sets_ranks_apart(ranks: Pool) -> None:
    """As on two hosts, ranks send messages."""
    ranks.run(trains, "neighbours", world=2)
    if not all(ranks.run(trains_apart, world=2)):
        pytest.skip("network namespaces are not allowed here")
    ranks.run(trains, "neighbours", world=2)


def one_cannot_read() -> None:
    ranks = Ranks(None, None)
    transport, flat = Transport.of(ranks, torch.device("cpu"), True), torch.full((8,), float(ranks.rank))
    window = transport.open(flat, 4)
    if ranks.rank == 1:
        window = replace(window, peers=tuple((pid, 0) for pid, _ in window.peers))  # where a process has no memory
    gather = transport.gather("testing")
    gather.start(window)
    with raises(CommunicationError, "freed its memory" if ranks.rank == 1 else "rank 1 could not go on"):
        gather.finish()


def test_all_hear_of_a_rank_that_cannot_read(ranks: Pool) -> None:
    """It has no updated params, so that no rank may go on."""
    ranks.run(one_cannot_read, world=2)
