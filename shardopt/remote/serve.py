"""Serves a rank's slices to other ranks without its help, so that ``state_dict()`` is whole on one rank alone.

A script that saves on rank 0 only makes no call on the others, which may be computing, waiting for rank 0 in the next
step, or at their end. So every process has a thread that answers::

    rank 0   step k   state_dict() . ask . ask . save      step k+1
    rank 1   step k   forward  backward  (waits for rank 0) step k+1
             thread        . answer . answer .

A sharded step needs every rank, so all that is read while one rank reads is of one step; a rank that has not come to
the end of that step lets the reader wait. After each answer the rank says whether the moment was still the same when
the last byte had left. Only bytes travel: over a socket in a directory of the user's own if all ranks are on one
machine, else over TCP. Both sides prove that they know a random key that the ranks shared. :mod:`.peers` is the side of
the rank that reads.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import ShardoptError, StateError
from ..partition.comm.ended import note_ended
from ..partition.comm.patience import attending, note_beat
from .ended_peers import EndedPeers
from .epoch import Moment
from .listener import Listener

if TYPE_CHECKING:
    from .apart import Apart

MAX_REQUEST = 1 << 16  # bytes; no request of a rank is longer: one may list the gathers of a unit of many buckets
MAX_ERROR = 4096  # characters of an error's text; the peer reads at most 64 KiB
CHUNK = 64 << 20  # bytes of one answer
# A stranger must not hold threads and sockets. Test: test_strangers_hold_nothing_for_long in
# tests/partition/test_serve.py.
HANDSHAKE = 10.0  # seconds in which a peer must prove that it knows the key
STRANGERS = 64  # connections without a proof, in addition to those of all ranks; with more, the oldest is dropped

OK, ERROR = b"\0", b"\1"


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
        last_asked: when another rank last read, or said that it reads alone.
        read_alone: when another rank last said that it reads alone.
        ended: the peers whose processes end.
        apart: tells peers that evaluate where this rank is.
    """

    token: str
    key: bytes
    readable: Readable | None
    ranks: int = 0
    last_asked: float = 0.0  # by the monotonic clock
    read_alone: float = 0.0
    ended: EndedPeers = field(default_factory=EndedPeers)
    apart: Apart | None = None
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

    def attend(self, peer: connection.Connection[Any, Any], facts: Sequence[Any]) -> None:
        """Takes the beats of a peer that reads alone, until it leaves, or is killed.

        Args:
            facts: what :func:`facts_of` returned there.
        """
        with peer, attending(self.ended.groups):
            try:
                self._note_beat()
                peer.send_bytes(OK)  # it begins once all ranks know
                while peer.recv_bytes(1):
                    self._note_beat()
            except (EOFError, OSError):
                for group, (rank, count) in zip(self.ended.groups, facts, strict=True):
                    note_ended(group, int(rank), int(count))

    def _note_beat(self) -> None:
        self.last_asked = self.read_alone = time.monotonic()
        note_beat(self.ended.groups)

    def retire(self) -> None:
        """Answers all farewells: this rank will not read any more."""
        with self._lock:
            self._is_retired, leaving, self._leaving = True, self._leaving, []
        for peer in leaving:
            _answer_farewell(peer)


def _answer_farewell(peer: connection.Connection[Any, Any]) -> None:
    with peer, suppress(OSError):
        peer.send_bytes(OK)


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
                time.sleep(0.01)  # an error that stays must not keep a core busy
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
                if "alone" in request:
                    slices.attend(peer, request["alone"])
                    return
                if "ended" in request:
                    slices.ended.keep(peer, request["ended"])
                    return
                if ("where" in request or "complete" in request) and slices.apart is not None:
                    peer.send_bytes(json.dumps(slices.apart.answer(request)).encode())
                    continue
                _send(peer, slices, request)
        peer.close()

    def _greet(self, peer: connection.Connection[Any, Any]) -> ServedSlices | None:
        """Returns the slices that the peer asks for, once both have proved that they know its key."""
        greeting = json.loads(peer.recv_bytes(MAX_REQUEST))
        slices = self._served.get(str(greeting["token"]))
        if slices is None:
            return None
        challenge = secrets.token_hex(32)
        proof = proof_of(slices.key, greeting["challenge"], "server")
        peer.send_bytes(json.dumps({"proof": proof, "challenge": challenge}).encode())
        answer = json.loads(peer.recv_bytes(MAX_REQUEST))["proof"]
        return slices if hmac.compare_digest(str(answer), proof_of(slices.key, challenge, "client")) else None


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
            peer.send_bytes(OK)
            peer.send_bytes(bytes_of(found))
    except (RuntimeError, MemoryError) as error:
        # Without an answer the peer could not say why its read failed. Test: test_a_read_that_fails_is_told.
        kind = "" if isinstance(error, ShardoptError) else f"{type(error).__name__}: "
        peer.send_bytes(ERROR + f"{kind}{error}"[:MAX_ERROR].encode())
        return
    peer.send_bytes(OK)
    slices.last_asked = time.monotonic()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))


def proof_of(key: bytes, challenge: Any, side: str) -> str:
    # The side is part of the message, so that no stranger can have the other side answer one side's challenge.
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


# A forked child (a DataLoader worker) has the table but not the threads, so it serves nothing.
os.register_at_fork(after_in_child=_forget)
