"""Reads the slices that other ranks serve, and leaves together with them; see :mod:`.serve`.

A rank that is done (its optimizer was collected, or its interpreter ends) says farewell to the others, and goes on
answering until all of them did: rank 0 may still be saving. A rank whose interpreter ends says that as well, and goes
at once if another one waits for it in an exchange: see :mod:`.ended_peers`.
"""

from __future__ import annotations

import atexit
import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CommunicationError, StateError
from ..partition.comm.roll_call import end_what_was_told
from .apart import Apart
from .ended_peers import EndedPeers, facts_of
from .serve import (
    CHUNK,
    ERROR,
    HANDSHAKE,
    MAX_REQUEST,
    OK,
    ServedSlices,
    StateServer,
    bytes_of,
    own_machine,
    proof_of,
    server,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..partition.comm.group import Ranks
    from .epoch import Moment
    from .serve import Readable

# Seconds for which a process goes on answering at its end, while some rank has not said farewell: rank 0 may still be
# saving. A rank that was killed never says it, so the wait has an end.
LINGER = 120.0
# Seconds without a request after which close() no longer waits for one. A script that saves on rank 0 and closes on all
# ranks would lose slices if close() did not wait; ranks that never close must not hold up the others.
SILENCE = 5.0
_BEAT = 0.1  # seconds between two beats of a rank that reads alone; less than the shortest of the times above
_PAUSE = 0.05  # seconds between two checks of the time of the last request
# Seconds without a request after which a process goes that another rank waits for in vain.
_QUIET = 1.0

# They outlive their optimizers: a rank that ended at once would cut off a rank that is still saving. Test:
# test_ranks_leave_in_any_order in tests/partition/test_serve.py.
_PEERS: set[Peers] = set()


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
        self._is_missed = threading.Event()  # another rank waits in vain for this one, whose process ends

    @staticmethod
    def connect(
        ranks: Ranks,
        readable: Readable,
        groups: Sequence[dist.ProcessGroup] = (),
        trainer: Callable[[], int] = lambda: 0,
        message_of: Callable[[int, int], torch.Tensor | None] = lambda window, nbytes: None,
    ) -> Peers | None:
        """Collective. Returns None if some rank can open no socket: one rank alone can then read nothing.

        Args:
            groups: in which these ranks wait for each other, in one order on all of them.
            trainer: returns the thread that trains; 0: the main thread.
            message_of: see :meth:`shardopt.domain.sharded_params.ShardedParams.message_of`.
        """
        # Every rank makes a token and a key; all take those of rank 0.
        card = [own_machine(), secrets.token_hex(16), secrets.token_hex(32)]
        cards = ranks.exchange_json(card, "sharing a key for state_dict()")
        family = "AF_UNIX" if all(machine == cards[0][0] for machine, _, _ in cards) else "AF_INET"
        _, token, key = cards[0]
        slices = ServedSlices(token, bytes.fromhex(key), readable, ranks.size, ended=EndedPeers(groups))
        own: StateServer | None = None
        with suppress(OSError):
            own = server(family)
        address = None if own is None else own.address
        addresses = ranks.exchange_json(address, "exchanging addresses for state_dict()")
        if own is None or None in addresses:
            return None
        own.register(slices)
        peers = Peers(own, slices, addresses, ranks.rank, ranks.seconds)
        if ranks.group is not None and groups:
            slices.apart = Apart(
                ranks.group, groups, lambda rank: _connect(addresses[rank], slices), trainer, message_of
            )
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
            count = peer.recv_bytes_into(bytes_of(into))
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
        status = peer.recv_bytes(1 << 16)  # one byte, or an error with its text
        if status[:1] == ERROR:
            raise StateError(f"while {phase}: {status[1:].decode(errors='replace')}")

    def _await(self, peer: connection.Connection[Any, Any]) -> None:
        if not peer.poll(self._seconds):
            raise TimeoutError("no answer")

    @contextmanager
    def reading_alone(self) -> Iterator[None]:
        """A context in which this rank says to all others, again and again, that it reads: they wait for it.

        Raises:
            CommunicationError: a rank is gone.
        """
        others: list[connection.Connection[Any, Any]] = []
        has_left = threading.Event()
        beats = threading.Thread(target=_beat, args=(others, has_left), name="shardopt-beats", daemon=True)
        try:
            for rank, address in enumerate(self._addresses):
                if rank != self._rank:
                    others.append(self._announce(rank, address))
            beats.start()
            yield
        finally:
            has_left.set()
            if beats.ident is not None:
                beats.join()
            for peer in others:
                with peer, suppress(OSError):
                    peer.send_bytes(b"")  # the last word: who is killed says none

    def _announce(self, rank: int, address: Any) -> connection.Connection[Any, Any]:
        try:
            peer = _connect(address, self._slices)
            peer.send_bytes(json.dumps({"alone": facts_of(self._slices.ended.groups)}).encode())
            self._await(peer)
            peer.recv_bytes(1)
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise CommunicationError(
                f"look at the output of rank {rank}: it died, was closed, or did not answer within {self._seconds:g} s "
                f"while this rank announced that it reads alone: {error or 'it hung up'}."
            ) from error
        return peer

    def farewell(self) -> None:
        """Sends every other rank that this one will not read any more; returns once they sent the same, or are gone."""
        for _ in self._answers_to({"farewell": self._rank}):
            pass

    def _answers_to(self, request: dict[str, Any]) -> Iterator[bool]:
        """Sends a request to every other rank. Yields for each if it answered, or its process ended without."""
        waiting = []
        # Each rank starts with the next one, so that not all of them connect to rank 0 first.
        for address in (*self._addresses[self._rank + 1 :], *self._addresses[: self._rank]):
            with suppress(OSError, EOFError, ValueError, KeyError):
                peer = _connect(address, self._slices)
                peer.send_bytes(json.dumps(request).encode())
                waiting.append(peer)
        while waiting:
            for ready in connection.wait(waiting):
                assert isinstance(ready, connection.Connection)
                waiting.remove(ready)
                with ready:
                    has_answered = False
                    with suppress(OSError, EOFError):
                        has_answered = ready.recv_bytes(1) == OK
                yield has_answered

    def say_ended(self) -> None:
        """Tells every other rank that this process ends: this rank comes to no exchange any more."""
        threading.Thread(target=self._say_ended, name="shardopt-ended", daemon=True).start()

    def _say_ended(self) -> None:
        for has_answered in self._answers_to({"ended": facts_of(self._slices.ended.groups)}):
            if has_answered:
                self._is_missed.set()

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
            self._leaving.join(_PAUSE)
        self._slices.readable = None

    def retire(self) -> None:
        """Stops reading. This rank goes on serving until no other rank reads any more."""
        if self._leaving is None:
            self.disconnect()
            if self._slices.apart is not None:
                self._slices.apart.retire()
            self._slices.retire()
            self._leaving = threading.Thread(target=self._say_farewell, name="shardopt-farewell", daemon=True)
            self._leaving.start()

    def _say_farewell(self) -> None:
        self.farewell()
        self._server.unregister(self._slices)
        self._slices.readable = None
        _PEERS.discard(self)

    def linger(self, end: float) -> None:
        """Waits, once retired, until no other rank reads any more: at the interpreter's end.

        Until ``end``, and as long as a rank reads alone. If another rank waits for this one in vain, only until no rank
        reads at the moment.
        """
        assert self._leaving is not None
        while self._leaving.is_alive() and (now := time.monotonic()) < max(end, self._slices.read_alone + _QUIET):
            asked = self._slices.last_asked
            if self._is_missed.is_set() and (not asked or now - asked > _QUIET):
                return
            self._leaving.join(_PAUSE)


def _beat(others: Sequence[connection.Connection[Any, Any]], has_left: threading.Event) -> None:
    """Sends a beat to each rank until this one leaves."""
    while not has_left.wait(_BEAT):
        for peer in others:
            with suppress(OSError):  # who reads from a rank that is gone raises
                peer.send_bytes(OK)


def _connect(address: Any, slices: ServedSlices) -> connection.Connection[Any, Any]:
    peer = connection.Client(tuple(address) if isinstance(address, list) else address)
    try:
        challenge = secrets.token_hex(32)
        peer.send_bytes(json.dumps({"token": slices.token, "challenge": challenge}).encode())
        if not peer.poll(HANDSHAKE):
            raise TimeoutError("no greeting")
        answer = json.loads(peer.recv_bytes(MAX_REQUEST))
        if not hmac.compare_digest(str(answer["proof"]), proof_of(slices.key, challenge, "server")):
            raise OSError("somebody else answers at its address")
        peer.send_bytes(json.dumps({"proof": proof_of(slices.key, answer["challenge"], "client")}).encode())
    except BaseException:
        peer.close()
        raise
    return peer


def _linger() -> None:
    several, has_failed = list(_PEERS), hasattr(sys, "last_value")
    for peers in several:  # all retire first: other ranks may wait for them in another order
        peers.retire()
    for peers in several:
        peers.say_ended()
    # After an error it does not wait, for a rank that reads alone either: a launcher that watches this process must
    # notice its end soon, and the reader as well. Test: test_the_script_of_the_others_ends.
    end = time.monotonic() + LINGER
    for peers in several if not has_failed else ():
        peers.linger(end)
    end_what_was_told()


# A forked child (a DataLoader worker) must not wait at its end for the peers of its parent.
os.register_at_fork(after_in_child=_PEERS.clear)
atexit.register(_linger)
