"""Serves a rank's slices to other ranks without its help, so that ``state_dict()`` is whole on one rank alone.

A script that saves on rank 0 only makes no call on the others, which may be computing, waiting for rank 0 in the next
step, or at their end. So every process has a thread that answers::

    rank 0   step k   state_dict() . ask . ask . save      step k+1
    rank 1   step k   forward  backward  (waits for rank 0) step k+1
             thread        . answer . answer .

A sharded step needs every rank, so all that is read while one rank reads is of one step; a rank that has not come to
the end of that step lets the reader wait. After each answer the rank says whether the moment was still the same when
the last byte had left. Only bytes travel: over a socket in a directory of the user's own if all ranks are on one
machine, else over TCP. Both sides prove that they know a random key that the ranks shared.

A rank that is done (its optimizer was collected, or its interpreter ends) says farewell to the others, and goes on
answering until all of them did: rank 0 may still be saving.
"""

from __future__ import annotations

import atexit
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import CommunicationError, ShardoptError, StateError
from .epoch import Moment
from .listener import Listener

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks

MAX_REQUEST = 4096  # bytes; no request of a rank is longer
CHUNK = 64 << 20  # bytes of one answer
# A stranger must not hold threads and sockets. Test: test_strangers_hold_nothing_for_long in
# tests/partition/test_serve.py.
HANDSHAKE = 10.0  # seconds in which a peer must prove that it knows the key
STRANGERS = 64  # connections without a proof, in addition to those of all ranks; with more, the oldest is dropped
# Seconds for which a process goes on answering at its end, while some rank has not said farewell.
LINGER = 120.0
SILENCE = 5.0  # seconds without a request after which close() no longer waits for one
_LOOK = 0.05  # seconds between two looks at the time of the last request

_OK, _ERROR = b"\0", b"\1"


# Takes a moment, the number of a shard, the name of a state, start and stop. Returns a context in which these elements
# of this rank's slice lie in host memory, 1D, as they are at the moment. Raises ShardoptError if the moment has passed,
# or will not come, and at the end of the context if the moment has passed meanwhile.
Readable = Callable[[Moment, int, str, int, int], AbstractContextManager[torch.Tensor]]


@dataclass(eq=False)
class ServedSlices:
    """The slices of one optimizer on this rank, which the server sends to other ranks.

    Attributes:
        token: names the optimizer, on every rank.
        key: a secret of the optimizer's ranks.
        readable: None after ``close()``.
        ranks: their number.
        last_asked: when another rank last read.
    """

    token: str
    key: bytes
    readable: Readable | None
    ranks: int = 0
    last_asked: float = 0.0  # by the monotonic clock
    _is_retired: bool = False
    _leaving: list[connection.Connection[Any, Any]] = field(default_factory=list)  # peers that said farewell
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep_farewell(self, peer: connection.Connection[Any, Any]) -> None:
        """Keeps the connection of a peer that said farewell; this rank answers once it retires as well."""
        with self._lock:
            if not self._is_retired:
                self._leaving.append(peer)
                return
        _answer_farewell(peer)

    def retire(self) -> None:
        """Answers all farewells: this rank will not read any more."""
        with self._lock:
            self._is_retired, leaving, self._leaving = True, self._leaving, []
        for peer in leaving:
            _answer_farewell(peer)


def _answer_farewell(peer: connection.Connection[Any, Any]) -> None:
    with peer, suppress(OSError):
        peer.send_bytes(_OK)


class StateServer:
    """The threads of this process that answer for all of its optimizers.

    Connections whose peers have not proved yet that they know a key are ``_strangers``: they are dropped after a while,
    and the oldest one if there are too many.
    """

    def __init__(self, family: str):
        """``family``: AF_UNIX if all ranks share a file system and a kernel, else AF_INET."""
        self._listener = Listener((own_address(), 0) if family == "AF_INET" else None)
        self.address = self._listener.address
        self._served: dict[str, ServedSlices] = {}
        self._strangers: dict[connection.Connection[Any, Any], float] = {}  # until when; in the order of arrival
        self._lock = threading.Lock()  # of the strangers
        threading.Thread(target=self._accept_all, name="shardopt-serve", daemon=True).start()

    def forget(self) -> None:
        """See :meth:`Listener.forget`."""
        self._listener.forget()

    def register(self, slices: ServedSlices) -> None:
        self._served[slices.token] = slices

    def unregister(self, slices: ServedSlices) -> None:
        self._served.pop(slices.token, None)

    def _accept_all(self) -> None:
        while True:
            try:
                peer = self._listener.accept(self._drop_late())
            except (OSError, ValueError):  # the peer is gone again, too many open files, the interpreter's end
                time.sleep(0.01)
                continue
            if peer is not None:
                self._admit(peer)
                threading.Thread(target=self._answer, args=(peer,), name="shardopt-answer", daemon=True).start()

    def _admit(self, peer: connection.Connection[Any, Any]) -> None:
        ranks = max((slices.ranks for slices in list(self._served.values())), default=0)
        with self._lock:
            self._strangers[peer] = time.monotonic() + HANDSHAKE
            while len(self._strangers) > STRANGERS + 2 * ranks:
                self._drop(next(iter(self._strangers)))

    def _drop_late(self) -> float | None:
        """Drops strangers whose time is over. Returns the seconds until the next one's is; None if there is none."""
        with self._lock:
            now = time.monotonic()
            for peer in [peer for peer, until in self._strangers.items() if until <= now]:
                self._drop(peer)
            return min((until - now for until in self._strangers.values()), default=None)

    def _drop(self, peer: connection.Connection[Any, Any]) -> None:
        """Wakes the thread that reads from a stranger; the thread closes the connection."""
        del self._strangers[peer]
        with suppress(OSError), socket.socket(fileno=os.dup(peer.fileno())) as there:
            there.shutdown(socket.SHUT_RDWR)

    def _answer(self, peer: connection.Connection[Any, Any]) -> None:
        # A stranger may send anything.
        with suppress(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            try:
                slices = self._greet(peer)
            finally:
                with self._lock:
                    is_welcome = self._strangers.pop(peer, None) is not None
            while slices is not None and is_welcome:
                request = json.loads(peer.recv_bytes(MAX_REQUEST))
                if "farewell" in request:
                    slices.keep_farewell(peer)
                    return  # no thread waits for the answer: every rank says farewell, and there may be many
                _send(peer, slices, request)
        peer.close()

    def _greet(self, peer: connection.Connection[Any, Any]) -> ServedSlices | None:
        """Returns the slices that the peer asks for, once both have proved that they know its key."""
        greeting = json.loads(peer.recv_bytes(MAX_REQUEST))
        slices = self._served.get(str(greeting["token"]))
        if slices is None:
            return None
        challenge = secrets.token_hex(32)
        proof = _proof(slices.key, greeting["challenge"], "server")
        peer.send_bytes(json.dumps({"proof": proof, "challenge": challenge}).encode())
        answer = json.loads(peer.recv_bytes(MAX_REQUEST))["proof"]
        return slices if hmac.compare_digest(str(answer), _proof(slices.key, challenge, "client")) else None


def _send(peer: connection.Connection[Any, Any], slices: ServedSlices, request: dict[str, Any]) -> None:
    slices.last_asked = time.monotonic()
    try:
        readable = slices.readable
        if readable is None:
            raise StateError("save before close(): that rank has closed its optimizer, and its slices are gone.")
        moment, name = Moment(*map(int, request["moment"])), str(request["name"])
        numbers = (int(request[key]) for key in ("shard", "start", "stop"))
        # The bytes are sent from memory that the next step and the next load write to.
        with readable(moment, next(numbers), name, *numbers) as found:
            peer.send_bytes(_OK)
            peer.send_bytes(_bytes_of(found))
    except ShardoptError as error:
        peer.send_bytes(_ERROR + str(error).encode())
        return
    peer.send_bytes(_OK)
    slices.last_asked = time.monotonic()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))


class Peers:
    """The ranks of one optimizer: reads what they serve, and leaves together with them."""

    def __init__(self, server: StateServer, slices: ServedSlices, addresses: Sequence[Any], rank: int, seconds: float):
        """
        Args:
            server: shows this rank's slices to the others.
            addresses: of the servers, by rank.
            seconds: the longest that one answer may take.
        """
        self._server, self._slices, self._addresses = server, slices, addresses
        self._rank, self._seconds = rank, seconds
        self._open: dict[int, connection.Connection[Any, Any]] = {}
        self._lock = threading.Lock()  # a connection carries one request at a time
        self._leaving: threading.Thread | None = None

    @staticmethod
    def connect(ranks: Ranks, readable: Readable) -> Peers | None:
        """Collective. Returns None if some rank can open no socket: one rank alone can then read nothing."""
        # Every rank makes a token and a key; all take those of rank 0.
        card = [own_machine(), secrets.token_hex(16), secrets.token_hex(32)]
        cards = ranks.exchange_json(card, "sharing a key for state_dict()")
        family = "AF_UNIX" if all(machine == cards[0][0] for machine, _, _ in cards) else "AF_INET"
        _, token, key = cards[0]
        slices = ServedSlices(token, bytes.fromhex(key), readable, ranks.size)
        own: StateServer | None = None
        with suppress(OSError):
            own = server(family)
        address = None if own is None else own.address
        addresses = ranks.exchange_json(address, "exchanging addresses for state_dict()")
        if own is None or None in addresses:
            return None
        own.register(slices)
        peers = Peers(own, slices, addresses, ranks.rank, ranks.seconds)
        _PEERS.add(peers)
        return peers

    def read(self, rank: int, moment: Moment, shard: int, name: str, start: int, into: torch.Tensor) -> None:
        """Fills ``into`` (1D, host memory) with elements of a rank's slice from ``start`` on, all of the moment.

        Raises:
            CommunicationError: the rank is gone or does not answer.
            StateError: the rank is past the moment.
        """
        chunk = max(CHUNK // into.element_size(), 1)
        with self._lock:
            for first in range(0, into.numel(), chunk):
                part = into[first : first + chunk]
                span = {"start": start + first, "stop": start + first + part.numel()}
                self._read(rank, {"moment": moment, "shard": shard, "name": name, **span}, part)

    def _read(self, rank: int, request: dict[str, Any], into: torch.Tensor) -> None:
        phase = f"reading {request['name']} from rank {rank}"
        try:
            if rank not in self._open:
                self._open[rank] = _connect(self._addresses[rank], self._slices)
            peer = self._open[rank]
            peer.send_bytes(json.dumps(request).encode())
            self._check_status(peer, phase)
            self._await(peer)
            count = peer.recv_bytes_into(_bytes_of(into))
            if count != into.nbytes:
                raise OSError(f"{count} bytes came instead of {into.nbytes}")
            self._check_status(peer, phase)
        except (OSError, EOFError, ValueError, KeyError) as error:
            broken = self._open.pop(rank, None)
            if broken is not None:
                broken.close()
            raise CommunicationError(
                f"look at the output of rank {rank}: it died, was closed, or did not answer within {self._seconds:g} s "
                f"while {phase}: {error or 'it hung up'}. consolidate_state_dict() on every rank reads by another way."
            ) from error

    def _check_status(self, peer: connection.Connection[Any, Any], phase: str) -> None:
        self._await(peer)
        status = peer.recv_bytes(1 << 16)
        if status[:1] == _ERROR:
            raise StateError(f"while {phase}: {status[1:].decode(errors='replace')}")

    def _await(self, peer: connection.Connection[Any, Any]) -> None:
        if not peer.poll(self._seconds):
            raise TimeoutError("no answer")

    def farewell(self) -> None:
        """Tells every other rank that this one will not read any more; returns once they said the same, or are gone."""
        waiting = []
        # Each rank starts with the next one, so that not all of them connect to rank 0 first.
        for address in (*self._addresses[self._rank + 1 :], *self._addresses[: self._rank]):
            with suppress(OSError, EOFError, ValueError, KeyError):
                peer = _connect(address, self._slices)
                peer.send_bytes(json.dumps({"farewell": self._rank}).encode())
                waiting.append(peer)
        while waiting:
            for ready in connection.wait(waiting):  # an answer, or the end of that rank's process
                assert isinstance(ready, connection.Connection)
                waiting.remove(ready)
                ready.close()

    def disconnect(self) -> None:
        with self._lock:
            for peer in self._open.values():
                peer.close()
            self._open.clear()

    def close(self) -> None:
        """Stops serving, once every rank has come here or none has read for a while.

        A script that saves on rank 0 and closes on all has the others here while rank 0 reads.
        """
        self.retire()
        assert self._leaving is not None
        start = time.monotonic()
        while self._leaving.is_alive() and time.monotonic() - max(start, self._slices.last_asked) < SILENCE:
            self._leaving.join(_LOOK)
        self._slices.readable = None

    def retire(self) -> None:
        """Stops reading. This rank goes on serving until no other rank reads any more."""
        if self._leaving is None:
            self.disconnect()
            self._slices.retire()
            self._leaving = threading.Thread(target=self._say_farewell, name="shardopt-farewell", daemon=True)
            self._leaving.start()

    def _say_farewell(self) -> None:
        self.farewell()
        self._server.unregister(self._slices)
        self._slices.readable = None
        _PEERS.discard(self)

    def linger(self, end: float) -> None:
        """Waits, once retired, until no other rank reads any more, or until ``end``: at the interpreter's end."""
        assert self._leaving is not None
        self._leaving.join(max(end - time.monotonic(), 0))


def _connect(address: Any, slices: ServedSlices) -> connection.Connection[Any, Any]:
    peer = connection.Client(tuple(address) if isinstance(address, list) else address)
    try:
        challenge = secrets.token_hex(32)
        peer.send_bytes(json.dumps({"token": slices.token, "challenge": challenge}).encode())
        if not peer.poll(HANDSHAKE):
            raise TimeoutError("no greeting")
        answer = json.loads(peer.recv_bytes(MAX_REQUEST))
        if not hmac.compare_digest(str(answer["proof"]), _proof(slices.key, challenge, "server")):
            raise OSError("somebody else answers at its address")
        peer.send_bytes(json.dumps({"proof": _proof(slices.key, answer["challenge"], "client")}).encode())
    except BaseException:
        peer.close()
        raise
    return peer


def _proof(key: bytes, challenge: Any, side: str) -> str:
    # The side is part of the message, so that nobody can send one side's challenge to the other side for an answer.
    # multiprocessing's authkey will not do: one key for all optimizers of a listener, no deadline, MD5 on Python 3.11.
    return hmac.new(key, f"{side}:{challenge}".encode(), "sha256").hexdigest()


# -- where this process is ---------------------------------------------------------------------------------------------


def own_machine() -> str:
    """Returns a text that is equal in processes with one kernel and one view of its files: they share paths."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return socket.gethostname()


def own_address() -> str:
    """Returns this machine's address on the way to MASTER_ADDR, by which the other ranks can reach it."""
    master = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master or socket.gethostname(), 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


# -- one process -------------------------------------------------------------------------------------------------------

_LOCK = threading.Lock()
_SERVERS: dict[str, StateServer] = {}
# They outlive their optimizers: a rank that ended at once would cut off a rank that is still saving. Test:
# test_ranks_leave_in_any_order in tests/partition/test_serve.py.
_PEERS: set[Peers] = set()


def server(family: str) -> StateServer:
    """Returns this process's server, and starts it at the first call."""
    with _LOCK:
        if family not in _SERVERS:
            _SERVERS[family] = StateServer(family)
        return _SERVERS[family]


def _forget() -> None:
    for each in _SERVERS.values():
        each.forget()
    _SERVERS.clear()
    _PEERS.clear()


def _linger() -> None:
    # After an error it does not wait: a launcher that watches this process must notice its end soon.
    end = time.monotonic() + (0.0 if hasattr(sys, "last_value") else LINGER)
    several = list(_PEERS)
    for peers in several:  # all retire first: other ranks may wait for them in another order
        peers.retire()
    for peers in several:
        peers.linger(end)


# A forked child (a DataLoader worker) has the tables but not the threads, so it serves nothing.
os.register_at_fork(after_in_child=_forget)
atexit.register(_linger)
