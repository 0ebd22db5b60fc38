"""A rank's slices, read by other ranks without its help: what makes ``state_dict()`` whole on one rank alone.

A script that saves on rank 0 only makes no call on the others, which may be computing, waiting for rank 0 in the next
step, or at their end. So every process has a thread that answers::

    rank 0   step k   state_dict() . ask . ask . save      step k+1
    rank 1   step k   forward  backward  (waits for rank 0) step k+1
             thread        . answer . answer .

A sharded step needs every rank, so what is read while one rank reads is of one step; a rank that has not come to its
end yet lets the asking one wait. Behind each answer a rank says whether it still was so when the last byte had left.
Only bytes travel, over a socket in a directory of the user's own where all ranks are on one machine, else over TCP;
both sides prove that they know a random key that the ranks shared.

A rank that is done (its optimizer was collected, or its interpreter ends) says farewell to the others, and goes on
answering until all of them did: rank 0 may be saving yet.
"""

import atexit
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Protocol, cast

import torch

from ..errors import CommunicationError, ShardoptError, StateError
from ..partition.comm.group import Ranks
from .epoch import Moment
from .listener import Listener

MAX_REQUEST = 4096  # bytes; a longer one is not ours
CHUNK = 64 << 20  # bytes of one answer
HANDSHAKE = 10.0  # seconds that a peer has to prove who it is
STRANGERS = 64  # connections that have not proved it yet, beside those of all ranks: of more the oldest is dropped
# Seconds that a process goes on answering at its end, for ranks that did not say farewell.
LINGER = 120.0
SILENCE = 5.0  # seconds without a question behind which an optimizer that is closed stops to wait for one
_LOOK = 0.05

_OK, _ERROR = b"\0", b"\1"


class Readable(Protocol):
    """What a rank shows of one optimizer."""

    def slice_at(self, moment: Moment, number: int, name: str, start: int, stop: int) -> torch.Tensor:
        """1D, in host memory: elements of this rank's slice of one state, as they are at a moment. Perhaps a view.

        Raises:
            ShardoptError: it is no longer, or will not be.
        """

    def check_at(self, moment: Moment, name: str) -> None:
        """Raises ShardoptError unless all that ``slice_at`` gave until now was of the moment."""


@dataclass(eq=False)
class Shelf:
    """One optimizer's slices on this rank.

    Attributes:
        token: names the optimizer on every rank.
        key: what all of its ranks know, and nobody else.
        ranks: how many they are.
        last_asked: when another rank last read.
    """

    token: str
    key: bytes
    readable: Readable | None
    ranks: int = 0
    last_asked: float = 0.0  # by the monotonic clock
    _is_retired: bool = False
    _leaving: "list[connection.Connection[Any, Any]]" = field(default_factory=list)  # who said farewell
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hear_farewell(self, peer: "connection.Connection[Any, Any]") -> None:
        """Keeps the connection, for an answer when this rank leaves too."""
        with self._lock:
            if not self._is_retired:
                self._leaving.append(peer)
                return
        _answer_farewell(peer)

    def retire(self) -> None:
        """Nobody here will ask any more."""
        with self._lock:
            self._is_retired, leaving, self._leaving = True, self._leaving, []
        for peer in leaving:
            _answer_farewell(peer)


def _answer_farewell(peer: "connection.Connection[Any, Any]") -> None:
    with peer, suppress(OSError):
        peer.send_bytes(_OK)


class Hall:
    """Connections whose peers have not proved yet who they are. However many come, they do not wait here for long."""

    def __init__(self) -> None:
        self._until: dict[connection.Connection[Any, Any], float] = {}  # in the order in which they came
        self._lock = threading.Lock()

    def enter(self, peer: "connection.Connection[Any, Any]", room: int) -> None:
        with self._lock:
            self._until[peer] = time.monotonic() + HANDSHAKE
            while len(self._until) > room:
                self._drop(next(iter(self._until)))

    def leave(self, peer: "connection.Connection[Any, Any]") -> bool:
        """Whether it was still welcome."""
        with self._lock:
            return self._until.pop(peer, None) is not None

    def clear(self) -> float | None:
        """Drops those whose time is over. Returns for how long nothing is to be done; None: until one comes."""
        with self._lock:
            now = time.monotonic()
            for peer in [peer for peer, until in self._until.items() if until <= now]:
                self._drop(peer)
            return min((until - now for until in self._until.values()), default=None)

    def _drop(self, peer: "connection.Connection[Any, Any]") -> None:
        """Wakes the thread that reads from it, which closes it."""
        del self._until[peer]
        with suppress(OSError), socket.socket(fileno=os.dup(peer.fileno())) as there:
            there.shutdown(socket.SHUT_RDWR)


class Server:
    """The threads of this process that answer, for all of its optimizers."""

    def __init__(self, family: str):
        """``family``: AF_UNIX where all ranks share a file system and a kernel, else AF_INET."""
        self._listener = Listener((own_address(), 0) if family == "AF_INET" else None)
        self.address = self._listener.address
        self._shelves: dict[str, Shelf] = {}
        self._hall = Hall()
        threading.Thread(target=self._accept, name="shardopt-serve", daemon=True).start()

    def leave(self) -> None:
        """See :meth:`Listener.leave`."""
        self._listener.leave()

    def show(self, shelf: Shelf) -> None:
        self._shelves[shelf.token] = shelf

    def hide(self, shelf: Shelf) -> None:
        self._shelves.pop(shelf.token, None)

    def _accept(self) -> None:
        while True:
            try:
                peer = self._listener.accept(self._hall.clear())
            except (OSError, ValueError):  # a peer that was gone again, too many open files, the interpreter's end
                time.sleep(0.01)
                continue
            if peer is not None:
                ranks = max((shelf.ranks for shelf in list(self._shelves.values())), default=0)
                self._hall.enter(peer, STRANGERS + 2 * ranks)
                threading.Thread(target=self._answer, args=(peer,), name="shardopt-answer", daemon=True).start()

    def _answer(self, peer: "connection.Connection[Any, Any]") -> None:
        # A stranger may send anything.
        with suppress(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            try:
                shelf = self._greet(peer)
            finally:
                is_welcome = self._hall.leave(peer)
            while shelf is not None and is_welcome:
                request = json.loads(peer.recv_bytes(MAX_REQUEST))
                if "farewell" in request:
                    shelf.hear_farewell(peer)
                    return  # no thread waits for the answer: as many come as there are ranks
                _send(peer, shelf, request)
        peer.close()

    def _greet(self, peer: "connection.Connection[Any, Any]") -> Shelf | None:
        """The shelf that the peer asks for, once both have shown that they know its key."""
        greeting = json.loads(peer.recv_bytes(MAX_REQUEST))
        shelf = self._shelves.get(str(greeting["token"]))
        if shelf is None:
            return None
        challenge = secrets.token_hex(32)
        proof = _proof(shelf.key, greeting["challenge"], "server")
        peer.send_bytes(json.dumps({"proof": proof, "challenge": challenge}).encode())
        answer = json.loads(peer.recv_bytes(MAX_REQUEST))["proof"]
        return shelf if hmac.compare_digest(str(answer), _proof(shelf.key, challenge, "client")) else None


def _send(peer: "connection.Connection[Any, Any]", shelf: Shelf, request: dict[str, Any]) -> None:
    shelf.last_asked = time.monotonic()
    try:
        readable = shelf.readable
        if readable is None:
            raise StateError("that rank has closed its optimizer, and its slices are gone. Save before close().")
        moment, name = Moment(*map(int, request["moment"])), str(request["name"])
        numbers = (int(request[key]) for key in ("shard", "start", "stop"))
        found = readable.slice_at(moment, next(numbers), name, *numbers)
        peer.send_bytes(_OK)
        peer.send_bytes(_bytes_of(found))
        # They were sent from where the next step and the next load write.
        readable.check_at(moment, name)
    except ShardoptError as error:
        peer.send_bytes(_ERROR + str(error).encode())
        return
    peer.send_bytes(_OK)
    shelf.last_asked = time.monotonic()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))


class Peers:
    """The other ranks' servers, as one optimizer knows them."""

    def __init__(self, shelf: Shelf, addresses: Sequence[Any], rank: int, seconds: float):
        """``addresses`` by rank, this one's too; ``seconds``: the longest that one answer may take."""
        self._shelf, self._addresses, self._rank, self._seconds = shelf, addresses, rank, seconds
        self._open: dict[int, connection.Connection[Any, Any]] = {}
        self._lock = threading.Lock()  # a connection carries one question at a time

    def read(self, rank: int, moment: Moment, shard: int, name: str, start: int, into: torch.Tensor) -> None:
        """Fills ``into`` (1D, host memory) with elements of the rank's slice from ``start`` on, all of the moment.

        Raises:
            CommunicationError: the rank is gone or does not answer.
            StateError: it no longer has what is asked for.
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
                self._open[rank] = _connect(self._addresses[rank], self._shelf)
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
                f"while {phase}: {error or 'it hung up'}. It died, was closed, or did not answer within "
                f"{self._seconds:g} s. Look at its output; consolidate_state_dict() on every rank reads by another way."
            ) from error

    def _check_status(self, peer: "connection.Connection[Any, Any]", phase: str) -> None:
        self._await(peer)
        status = peer.recv_bytes(1 << 16)
        if status[:1] == _ERROR:
            raise StateError(f"while {phase}: {status[1:].decode(errors='replace')}")

    def _await(self, peer: "connection.Connection[Any, Any]") -> None:
        if not peer.poll(self._seconds):
            raise TimeoutError("no answer")

    def farewell(self) -> None:
        """Tells every other rank that this one will not ask any more; returns when they told the same, or are gone."""
        waiting = []
        # Each begins behind itself, so that they do not all come to rank 0 first.
        for address in (*self._addresses[self._rank + 1 :], *self._addresses[: self._rank]):
            with suppress(OSError, EOFError, ValueError, KeyError):
                peer = _connect(address, self._shelf)
                peer.send_bytes(json.dumps({"farewell": self._rank}).encode())
                waiting.append(peer)
        while waiting:
            for ready in connection.wait(waiting):  # an answer, or the end of who should have given it
                assert isinstance(ready, connection.Connection)
                waiting.remove(ready)
                ready.close()

    def close(self) -> None:
        with self._lock:
            for peer in self._open.values():
                peer.close()
            self._open.clear()


def _connect(address: Any, shelf: Shelf) -> "connection.Connection[Any, Any]":
    peer = connection.Client(tuple(address) if isinstance(address, list) else address)
    try:
        challenge = secrets.token_hex(32)
        peer.send_bytes(json.dumps({"token": shelf.token, "challenge": challenge}).encode())
        if not peer.poll(HANDSHAKE):
            raise TimeoutError("no greeting")
        answer = json.loads(peer.recv_bytes(MAX_REQUEST))
        if not hmac.compare_digest(str(answer["proof"]), _proof(shelf.key, challenge, "server")):
            raise OSError("somebody else answers at its address")
        peer.send_bytes(json.dumps({"proof": _proof(shelf.key, answer["challenge"], "client")}).encode())
    except BaseException:
        peer.close()
        raise
    return peer


def _proof(key: bytes, challenge: Any, side: str) -> str:
    # The side is part of it, so that nobody can have one side answer what the other one asked. Not multiprocessing's
    # authkey, which is one for all optimizers of a listener, waits without a deadline, and is MD5 on Python 3.11.
    return hmac.new(key, f"{side}:{challenge}".encode(), "sha256").hexdigest()


# -- where this process is ---------------------------------------------------------------------------------------------


def own_machine() -> str:
    """Equal in processes that can reach each other by a path: one kernel, one view of its files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return socket.gethostname()


def own_address() -> str:
    """The address by which the machine that ranks meet at is reached from here."""
    master = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master or socket.gethostname(), 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


# -- one process -------------------------------------------------------------------------------------------------------


class Showing:
    """One optimizer's slices, shown to the other ranks and seen of them."""

    def __init__(self, server: Server, shelf: Shelf, peers: Peers):
        self._server, self._shelf, self._peers = server, shelf, peers
        self._leaving: threading.Thread | None = None
        server.show(shelf)
        _SHOWINGS.add(self)

    @staticmethod
    def begin(ranks: Ranks, readable: Readable) -> "Showing | None":
        """Collective. None where some rank can open no socket: nothing can then be read by one rank alone."""
        cpu = torch.device("cpu")
        # Every rank makes a key; rank 0's is taken.
        card = [own_machine(), secrets.token_hex(16), secrets.token_hex(32)]
        cards = ranks.exchange_json(card, cpu, "sharing a key for state_dict()")
        family = "AF_UNIX" if all(machine == cards[0][0] for machine, _, _ in cards) else "AF_INET"
        _, token, key = cards[0]
        shelf = Shelf(token, bytes.fromhex(key), readable, ranks.size)
        own: Server | None = None
        with suppress(OSError):
            own = server(family)
        address = None if own is None else own.address
        addresses = ranks.exchange_json(address, cpu, "exchanging addresses for state_dict()")
        if own is None or None in addresses:
            return None
        return Showing(own, shelf, Peers(shelf, addresses, ranks.rank, ranks.seconds))

    def read(self, rank: int, moment: Moment, shard: int, name: str, start: int, into: torch.Tensor) -> None:
        """See :meth:`Peers.read`."""
        self._peers.read(rank, moment, shard, name, start, into)

    def close(self) -> None:
        """Nothing is shown any more, once every rank came here or nobody has read for a while.

        A script that saves on rank 0 and closes on all has the others here while rank 0 reads.
        """
        self.retire()
        assert self._leaving is not None
        start = time.monotonic()
        while self._leaving.is_alive() and time.monotonic() - max(start, self._shelf.last_asked) < SILENCE:
            self._leaving.join(_LOOK)
        self._shelf.readable = None

    def retire(self) -> None:
        """Nobody here will ask any more. What is shown stays until no other rank will."""
        if self._leaving is None:
            self._peers.close()
            self._shelf.retire()
            self._leaving = threading.Thread(target=self._leave, name="shardopt-farewell", daemon=True)
            self._leaving.start()

    def _leave(self) -> None:
        self._peers.farewell()
        self._server.hide(self._shelf)
        self._shelf.readable = None
        _SHOWINGS.discard(self)

    def linger(self, end: float) -> None:
        """At the interpreter's end, once retired: waits until no other rank will ask any more, or until ``end``."""
        assert self._leaving is not None
        self._leaving.join(max(end - time.monotonic(), 0))


_LOCK = threading.Lock()
_SERVERS: dict[str, Server] = {}
_SHOWINGS: set[Showing] = set()  # kept: they outlive their optimizers


def server(family: str) -> Server:
    """This process's, started when it is first asked for."""
    with _LOCK:
        if family not in _SERVERS:
            _SERVERS[family] = Server(family)
        return _SERVERS[family]


def _forget() -> None:
    for each in _SERVERS.values():
        each.leave()
    _SERVERS.clear()
    _SHOWINGS.clear()


def _linger() -> None:
    # Not behind an error: the other ranks are to hear of it soon, from whoever watches this process.
    end = time.monotonic() + (0.0 if hasattr(sys, "last_value") else LINGER)
    showings = list(_SHOWINGS)
    for showing in showings:  # all of them first: other ranks may wait for them in another order
        showing.retire()
    for showing in showings:
        showing.linger(end)


# A forked child (a DataLoader worker) has the tables but not the threads, and shows nothing.
os.register_at_fork(after_in_child=_forget)
atexit.register(_linger)
