"""Every call to the operating system fails once, in every way that it can: nothing is lost, and training goes on.

A training is a list of acts (steps, a save, a load). Each act is taken again and again, with a fault at another call
each time. An act that fails does so with an OffloadError on every rank and has changed nothing; without a fault it
succeeds, and the end is that of the training without faults, to the bit.
"""

import copy
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardopt import Offload, OffloadError, ShardedAdamW, Tuning
from shardopt.kernels import native_backend
from shardopt.offload.disk import file_io
from shardopt.offload.disk import system as calls
from shardopt.offload.disk.pipeline import Pipeline
from tests.support.moments import DEADLINE, until
from tests.support.ranks import Pool
from tests.support.training import raw

CHUNK = 8192  # two pages, so that a transfer can be cut short


class System:
    """The system calls that a file needs; some fail in subclasses."""

    open, read, write = staticmethod(calls.open), staticmethod(calls.read), staticmethod(calls.write)
    reserve, truncate, sync = staticmethod(calls.reserve), staticmethod(calls.truncate), staticmethod(calls.sync)


class Faulty(System):
    """The calls of one kind are counted, and one of them goes wrong; ``at=None``: the first of each transfer."""

    def __init__(self, kind: str, fault: str, at: int | None):
        self.kind, self.fault, self.at = kind, fault, at
        self.count = 0
        self.fired = False
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def _is_due(self, kind: str) -> bool:
        if kind != self.kind:
            return False
        with self._lock:
            self.count += 1
            due = self._is_first() if self.at is None else self.count - 1 == self.at
            self.fired = self.fired or due
            return due

    def _is_first(self) -> bool:
        """Behind a fault, the thread's next call makes it good."""
        is_first = not getattr(self._of_thread, "goes_on", False)
        self._of_thread.goes_on = is_first
        return is_first

    def _fail(self) -> None:
        if self.fault in errno.errorcode.values():
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number))

    def open(self, name: str, flags: int, mode: int, folder: int) -> int:
        if self._is_due("open"):
            self._fail()
        return super().open(name, flags, mode, folder)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self._is_due("read"):
            self._fail()
            if self.fault == "short":
                return super().read(fd, buffer[: len(buffer) // 2], offset)
            if self.fault == "odd":
                return super().read(fd, buffer, offset) and 1
            if self.fault == "end":
                return 0
            if self.fault == "flip":  # once: what was read again is right
                count = super().read(fd, buffer, offset)
                buffer[7] ^= 1
                return count
        return super().read(fd, buffer, offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self._is_due("write"):
            self._fail()
            if self.fault == "short":
                return super().write(fd, buffer[: len(buffer) // 2 // 4096 * 4096 or 4096], offset)
            if self.fault == "odd":
                return super().write(fd, buffer, offset) and 1
            if self.fault == "end":
                return 0
        return super().write(fd, buffer, offset)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        if self._is_due("reserve"):
            self._fail()
        super().reserve(fd, offset, length)


FAULTS = [
    *(("read", fault) for fault in ("EIO", "EINTR", "short", "odd", "end", "flip")),
    *(("write", fault) for fault in ("EIO", "ENOSPC", "EINTR", "short", "odd", "end")),
    *(("reserve", fault) for fault in ("ENOSPC", "EINTR", "EFBIG")),
    *(("open", fault) for fault in ("EMFILE", "EACCES")),
]
HARMLESS = ("EINTR", "short", "odd", "flip")  # made good without an error


@contextmanager
def system(one: System) -> Iterator[None]:
    with patch.object(file_io, "system", one):
        yield


# -- the training ------------------------------------------------------------------------------------------------------


class Training:
    """Steps, weights that were written, a save, a load and a move into memory and back."""

    def __init__(self, root: Path, offload: bool = True, fraction: float = 1.0):
        self.params = [Parameter(torch.linspace(-1, 1, n).to(torch.bfloat16)) for n in (700, 2300, 1)]
        self.optimizer = ShardedAdamW(
            self.params,
            lr=1e-2,
            offload=Offload(root, fraction=fraction) if offload else None,
            tuning=Tuning(chunk_bytes=CHUNK, bucket_bytes=2000),
        )
        self.saved: Any = None
        alone: list[Callable[[], None]] = [
            self.save,
            self.write_weights,
            # In an act of its own: masters follow the weights whether the rest of a step succeeds or not.
            self.optimizer.refresh_masters,
            lambda: self.step(2),
            self.load,
            self.optimizer.refresh_masters,
        ]
        together: list[Callable[[], None]] = [self.optimizer.consolidate_state_dict]  # where all ranks hear of it
        self.acts: list[Callable[[], None]] = [
            lambda: self.step(0),
            lambda: self.step(1),
            *(together if dist.is_initialized() else alone),
            self.turn_on_amsgrad,
            lambda: self.step(3),
            *((lambda: self.optimizer.offload("cpu"), self.optimizer.reload) if offload else ()),
        ]

    def step(self, number: int) -> None:
        for index, param in enumerate(self.params):
            wave = torch.sin(torch.arange(param.numel()) * (index + 1.0) + number)
            param.grad = wave.to(param.dtype).reshape(param.shape)
        self.optimizer.step()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def write_weights(self) -> None:
        with torch.no_grad():
            self.params[1][100:200] = 0.5

    def load(self) -> None:
        self.optimizer.load_state_dict(self.saved)

    def turn_on_amsgrad(self) -> None:
        self.optimizer.param_groups[0]["amsgrad"] = True

    def bits(self) -> list[bytes]:
        states = [(name, value) for param in self.params for name, value in self.optimizer.state[param].items()]
        # A state that was made for a step that failed is there, and zero.
        return [raw(param) for param in self.params] + [
            name.encode() + raw(value) for name, value in states if any(raw(value))
        ]


def undisturbed() -> list[list[bytes]]:
    """The bits before each act, and at the end, where nothing rests on a disk."""
    training = Training(Path(), offload=False)
    before = []
    for act in training.acts:
        before.append(training.bits())
        act()
    return [*before, *[training.bits()] * 3]  # where nothing moves, a move changes nothing


def disturbed(root: str, kind: str, fault: str, every: int, expected: list[list[bytes]], fraction: float = 1.0) -> int:
    """One training, with a fault at each ``every``-th call of each act on the last rank. How many there were."""
    training, count = Training(Path(root), fraction=fraction), 0
    is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    is_harmless = fault in HARMLESS
    for number, (act, before) in enumerate(zip(training.acts, expected, strict=False)):
        where = f"{kind} {fault}, act {number}"
        for at in itertools.count(0, every):
            faulty = Faulty(kind, fault, None if is_harmless else at)
            try:
                with system(faulty if is_last else System()):
                    act()
                failed = False
            except OffloadError:
                failed = True
                assert training.bits() == before, f"{where}: call {at} that failed was not without effect"
            has_fired, is_same = told_by_last(faulty.fired, failed)
            assert is_same, f"{where}: ranks saw other errors"
            assert failed == (has_fired and not is_harmless), f"{where}: call {at}"
            count += has_fired
            if not failed:
                break
    assert training.bits() == expected[-1], f"{kind} {fault}: the end is another one"
    training.optimizer.close()
    return count


def told_by_last(has_fired: bool, failed: bool) -> tuple[bool, bool]:
    """What the last rank says of its fault, and whether the act failed on all ranks or on none."""
    if not dist.is_initialized():
        return has_fired, True
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (has_fired, failed))
    return rows[-1][0], len({each for _, each in rows}) == 1


def all_faults(root: str, every: int) -> dict[str, int]:
    """EIO at every ``every``-th call, other faults at an eighth of these: by fault, how many there were."""
    expected = undisturbed()
    often = {"EIO", *HARMLESS}
    part = {"write a part": disturbed(root, "write", "EIO", every, expected, fraction=0.5)}
    return part | {
        f"{kind} {fault}": disturbed(
            root, kind, fault, every * (1 if fault in often or kind in ("open", "reserve") else 8), expected
        )
        for kind, fault in FAULTS
    }


def test_every_call_fails_once(tmp_path: Path) -> None:
    check(all_faults(str(tmp_path), 1))
    assert not os.listdir(tmp_path)


def test_every_call_fails_once_on_one_of_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks.run(all_faults, str(tmp_path), 2, world=2)[1:]:
        check(found)
    assert not os.listdir(tmp_path)


def check(found: dict[str, int]) -> None:
    for name, count in found.items():
        assert count >= (2 if name.startswith(("read", "write")) else 1), found
    assert min(found["read EIO"], found["write EIO"]) > 10, found


# -- what happens to the file behind our back --------------------------------------------------------------------------


def states_file(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder / "states"


def half_way(root: Path) -> Training:
    training = Training(root)
    for act in training.acts[:3]:  # two steps and a save
        act()
    return training


def test_a_flipped_bit_is_noticed_wherever_it_lies(tmp_path: Path) -> None:
    training = half_way(tmp_path)
    before = training.bits()
    noticed = []
    with open(states_file(tmp_path), "r+b", buffering=0) as file:
        pages = os.fstat(file.fileno()).st_size // file_io.PAGE
        for page in range(1, pages):
            place = page * file_io.PAGE + 37 * page % file_io.PAGE
            (octet,) = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([octet ^ 1 << page % 8]), place)
            try:
                assert training.bits() == before  # it was in the copy that does not hold
            except OffloadError as error:
                assert "not those that were written" in str(error)
                noticed.append(page)
            os.pwrite(file.fileno(), bytes([octet]), place)
    assert training.optimizer.engine.domain is not None
    homes: list[Any] = [shard.home for shard in training.optimizer.engine.domain.shards]
    segments = [home.segment(name, start) for home in homes for name in home.names for start, _ in home.chunks()]
    assert len(noticed) == sum(each.nbytes for each in segments) // file_io.PAGE > 10


def test_a_file_that_was_cut_off_is_told_and_a_checkpoint_mends_it(tmp_path: Path) -> None:
    expected = undisturbed()
    training = half_way(tmp_path)
    weights = [raw(param) for param in training.params]
    os.truncate(states_file(tmp_path), file_io.PAGE)
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"load_state_dict.*cut the file off"):
            training.step(2)
        assert [raw(param) for param in training.params] == weights
    training.load()
    for act in training.acts[3:]:
        act()
    assert training.bits() == expected[-1]


def test_a_file_that_vanishes_or_is_replaced_is_still_ours(tmp_path: Path) -> None:
    expected = undisturbed()
    training = half_way(tmp_path)
    file = states_file(tmp_path)
    file.unlink()
    file.write_text("somebody else's")
    for act in training.acts[3:]:
        act()
    assert training.bits() == expected[-1]
    training.optimizer.close()
    assert file.read_text() == "somebody else's"


def test_an_interrupted_step_has_not_happened(tmp_path: Path) -> None:
    training, launches = half_way(tmp_path), 0
    before = training.bits()

    def interrupt(*arguments: Any) -> None:
        nonlocal launches
        launches += 1
        if launches == 3:
            raise KeyboardInterrupt
        run(*arguments)

    run = native_backend.run
    with patch.object(native_backend, "run", interrupt), pytest.raises(KeyboardInterrupt):
        training.step(2)
    assert launches == 3 and training.bits() == before


class Stalled(System):
    """A disk that answers no read, or no write, as long as it is at work.

    Waits have their time, which is short, from the first such call on. Where the threads get no core, a wait would
    otherwise end before a transfer is under way, and nothing is left that holds the file.
    """

    def __init__(self, kind: str):
        self._kind, self._gate, self._is_called = kind, threading.Event(), threading.Event()

    def _stall(self, kind: str) -> None:
        if kind == self._kind:
            self._is_called.set()
            self._gate.wait(DEADLINE)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._stall("read")
        return super().read(fd, buffer, offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._stall("write")
        return super().write(fd, buffer, offset)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        wait = Pipeline._wait

        def wait_once_stalled(pipeline: Pipeline, is_over: Callable[[], bool], what: str) -> None:
            until(lambda: is_over() or self._is_called.is_set(), what)
            wait(pipeline, is_over, what)

        with system(self), patch.object(Pipeline, "_wait", wait_once_stalled):
            try:
                yield
            finally:
                self._gate.set()


def test_a_disk_that_does_not_answer_is_given_up_in_time(tmp_path: Path) -> None:
    expected = undisturbed()
    training = half_way(tmp_path)
    store: Any = training.optimizer.engine.domain.store  # type: ignore[union-attr]
    store.pipeline._deadline = 0.05
    before = training.bits()
    with Stalled("write").at_work():
        for _ in range(2):
            with pytest.raises(OffloadError, match="does not answer"):
                training.step(2)
            assert training.bits() == before
        with pytest.raises(OffloadError, match="does not answer"):
            store.close()  # its descriptor could become another file's under the transfer
    store.pipeline._deadline = DEADLINE
    for act in training.acts[3:]:
        act()
    assert training.bits() == expected[-1]


def test_a_disk_that_does_not_answer_holds_up_no_move(tmp_path: Path) -> None:
    expected = undisturbed()
    training = half_way(tmp_path)
    before = training.bits()
    store: Any = training.optimizer.engine.domain.store  # type: ignore[union-attr]
    store._reads._deadline = 0.05
    with Stalled("read").at_work():
        for _ in range(2):
            with pytest.raises(OffloadError, match="does not answer"):
                training.optimizer.offload("cpu")
        with pytest.raises(OffloadError, match="does not answer"):
            store.close()
    store._reads._deadline = DEADLINE
    assert training.bits() == before
    for act in training.acts[3:]:
        act()
    assert training.bits() == expected[-1]
