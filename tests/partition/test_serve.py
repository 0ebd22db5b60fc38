"""The socket by which ranks read each other: no stranger holds it up, many ranks can leave, nothing is left behind."""

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, process, util
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardopt.errors import StateError
from shardopt.remote import listener, serve
from shardopt.remote.epoch import Moment
from shardopt.remote.listener import Listener, reclaim
from shardopt.remote.peers import Peers, _connect
from shardopt.remote.serve import ServedSlices, StateServer
from tests.support.moments import until
from tests.support.training import raises

KEY = b"k" * 32


@contextmanager
def numbers(moment: Moment, number: int, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
    """What a rank shows: at moment (3, 0)."""
    if moment != Moment(3):
        raise StateError("moved on")
    yield torch.arange(start, stop, dtype=torch.float32)


def answering() -> int:
    return sum(thread.name == "shardopt-answer" for thread in threading.enumerate())


def stranger(server: StateServer, data: bytes = b"") -> socket.socket:
    there = socket.socket(socket.AF_UNIX)
    there.connect(server.address)
    with suppress(BrokenPipeError, ConnectionResetError):  # its time was over before it sent
        there.sendall(data)
    return there


def read(server: StateServer, slices: ServedSlices) -> None:
    into, peers = torch.empty(5), Peers(server, slices, [None, server.address], 0, 60.0)
    peers.read(1, Moment(3), 0, "exp_avg", 2, into)
    assert into.tolist() == [2, 3, 4, 5, 6]
    peers.disconnect()


def test_strangers_hold_nothing_for_long() -> None:
    server, slices = StateServer("AF_UNIX"), ServedSlices("token", KEY, numbers, 2)
    server.register(slices)
    before, most = answering(), serve.STRANGERS + 4
    # Silent ones, behind nothing, a byte, a length that does not come, a proof that does not come.
    greeting = json.dumps({"token": "token", "challenge": "x"}).encode()
    kinds = (b"", b"\0", b"\0\0\1\0", len(greeting).to_bytes(4, "big") + greeting)
    silent = [stranger(server, kinds[index % 4]) for index in range(3 * most)]
    read(server, slices)  # it came after them: all of them are in
    until(lambda: answering() - before <= most, "the oldest strangers to be dropped")
    with patch.object(serve, "HANDSHAKE", 0.01):
        late = [stranger(server, kind) for kind in kinds]
        for each in late:
            # A challenge, perhaps; then its time is over. Where it is over before the server has read, it is a reset.
            with each, suppress(ConnectionResetError):
                while each.recv(4096):
                    pass
    for each in silent:
        each.close()
    until(lambda: answering() <= before, "threads to end")


def test_a_read_that_fails_is_told() -> None:
    """The rank that asked gets the text of the error, whatever its type."""

    @contextmanager
    def broken(*_: Any) -> Iterator[torch.Tensor]:
        raise next(problems)
        yield torch.empty(0)

    server, slices = StateServer("AF_UNIX"), ServedSlices("token", KEY, broken, 2)
    server.register(slices)
    peers = Peers(server, slices, [None, server.address], 0, 60.0)
    problems = iter([MemoryError("no room"), RuntimeError("x" * (1 << 17)), StateError("moved on")])
    for words in ("reading exp_avg from rank 1: MemoryError: no room", "RuntimeError: xx", "rank 1: moved on"):
        with raises(StateError, words):
            peers.read(1, Moment(3), 0, "exp_avg", 2, torch.empty(5))
    peers.disconnect()


def test_nothing_that_is_said_shows_in_the_log() -> None:
    server = StateServer("AF_UNIX")
    before, raised = answering(), list[Any]()
    with patch.object(threading, "excepthook", raised.append):
        for said in (b"[" * 4000, b'{"a":' * 700, b"[]", b"1e999", b'"x"', b"\xff\xfe", b'{"token": {}}'):
            with connection.Client(server.address) as there:
                there.send_bytes(said)
                assert there.poll(60)
                try:
                    there.recv_bytes()
                    raise AssertionError(f"{said[:20]!r} was answered")
                except (EOFError, OSError):
                    pass
        until(lambda: answering() <= before, "threads to end")
    assert not raised


def test_all_ranks_come_at_once() -> None:
    """Nobody waits for another one to be accepted, and no thread for those who left."""
    there = Listener(None)
    callers = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    for each in callers:
        each.setblocking(False)
        each.connect(there.address)  # an error where the backlog is full
    for each in callers:
        each.close()
    server, slices = StateServer("AF_UNIX"), ServedSlices("token", KEY, numbers, 300)
    server.register(slices)
    before, leaving = answering(), list[Any]()
    for rank in range(300):
        peer = _connect(server.address, slices)
        peer.send_bytes(json.dumps({"farewell": rank}).encode())
        leaving.append(peer)
    until(lambda: answering() <= before, "threads to end")
    assert not connection.wait(leaving, 0)
    read(server, slices)  # it answers until it leaves itself
    slices.retire()
    for peer in leaving:
        assert peer.recv_bytes() == serve.OK
        peer.close()


def test_ranks_leave_in_any_order() -> None:
    world = 12
    servers = [StateServer("AF_UNIX") for _ in range(world)]
    served = [ServedSlices("token", KEY, numbers, world) for _ in range(world)]
    for server, slices in zip(servers, served, strict=True):
        server.register(slices)
    addresses = [server.address for server in servers]

    def leave(rank: int) -> None:
        served[rank].retire()
        Peers(servers[rank], served[rank], addresses, rank, 60.0).farewell()

    threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(world)]
    for thread in threads[1:]:
        thread.start()
    assert all(thread.is_alive() for thread in threads[1:])  # for rank 0
    threads[0].start()
    for thread in threads:
        thread.join()


# -- folders -----------------------------------------------------------------------------------------------------------


def end_of_a_process() -> None:
    """What multiprocessing does then, but for ending the parent's children, which are ranks that tests keep."""
    process._children.clear()  # type: ignore[attr-defined]
    util._exit_function()


def in_child(act: Callable[[], None], end: Callable[[], Any]) -> None:
    """As a process of its own that ends so."""
    child = os.fork()
    if not child:
        try:
            act()
            end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_killed_process_leaves_nothing_for_long() -> None:
    # pytest's own folders have names too long for a socket.
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as name, patch.object(tempfile, "tempdir", name):
        tmp_path = Path(name)
        living = Listener(None)
        kept = []
        in_child(lambda: kept.append(Listener(None)), lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert len(list(tmp_path.iterdir())) == 2
        # Not ours by mode or name, in the making, of a living process.
        for name, mode in (("open", 0o755), ("ready", 0o700)):
            (tmp_path / (listener._prefix() + name)).mkdir(mode=mode)
        (tmp_path / "shardopt-serve-00000000-other").mkdir(mode=0o700)
        os.utime(tmp_path / (listener._prefix() + "open"), (0, 0))
        another = Listener(None)
        names = {Path(each.address).parent.name for each in (living, another)}
        others = {listener._prefix() + "open", listener._prefix() + "ready", "shardopt-serve-00000000-other"}
        assert {each.name for each in tmp_path.iterdir()} == names | others
        assert os.stat(Path(living.address).parent).st_mode & 0o077 == 0
        old = time.time() - 2 * listener._UNFINISHED
        os.utime(tmp_path / (listener._prefix() + "ready"), (old, old))
        reclaim(tmp_path)
        assert {each.name for each in tmp_path.iterdir()} == names | others - {listener._prefix() + "ready"}
        # At its own end a process takes its folder along, as one of multiprocessing too.
        in_child(lambda: kept.append(Listener(None)), end_of_a_process)
        assert {each.name for each in tmp_path.iterdir()} == names | others - {listener._prefix() + "ready"}


def test_a_directory_with_a_long_name(tmp_path: Path) -> None:
    """The name of a socket is short; then the socket is elsewhere."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with patch.object(tempfile, "tempdir", str(deep)):
        there = Listener(None)
    assert there.address.startswith("/tmp/") and not list(deep.iterdir())
    in_child(there.forget, lambda: None)
    with socket.socket(socket.AF_UNIX) as caller:  # the child's copy was closed, not ours
        caller.connect(there.address)
