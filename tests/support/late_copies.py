"""A GPU of CPU tensors: all that is copied to and from it is copied as late as the order that was asked for allows.

An order that a store does not ask for is one that a GPU need not keep. So a copy is made when somebody waits for it,
and what it will be written to is full of NaN until then. Kernels that wait make nothing known to the host: until it
has waited itself, what a copy to the device comes from must stay as it was.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from shardopt import Offload
from shardopt.domain import tiers
from shardopt.offload.gradients import HostLanding
from shardopt.offload.kept import Kept
from shardopt.offload.near import NearStore
from shardopt.offload.store import Store
from shardopt.offload.streams import Copy, CopyStreams, Mark
from shardopt.partition.memory import zeros

CPU = torch.device("cpu")
_compare = ctypes.CDLL(None).memcmp  # a tenth of the time of torch.equal
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(eq=False)
class Later:
    """A copy that was asked for, and what comes before it."""

    copies: list[Copy]
    before: list["Later"]
    is_done: bool = False
    is_over: bool = False  # the host knows that it has ended

    def open(self) -> list["Later"]:
        """It and all before it that the host does not know to have ended, these first."""
        found: dict[Later, None] = {}
        self._open(found, set())
        return list(found)

    def _open(self, found: dict["Later", None], seen: set["Later"]) -> None:
        if self.is_over or self in seen:
            return
        seen.add(self)
        for each in self.before:
            each._open(found, seen)
        found[self] = None


class Upload(NamedTuple):
    """What the device may read until the host knows that it has."""

    by: Later
    source: torch.Tensor
    kept: torch.Tensor  # what it held when the copy was asked for

    def is_whole(self) -> bool:
        return _compare(self.source.data_ptr(), self.kept.data_ptr(), self.source.nbytes) == 0


class AtOnce:
    """Every copy is made when it is asked for."""

    def now(self) -> Mark:
        return None

    def to_device(self, copies: Sequence[Copy], after: Mark) -> Mark:
        for into, source in copies:
            into.copy_(source)

    to_host = to_device

    def wait(self, mark: Mark) -> None:
        pass

    synchronize = wait


@dataclass
class AsLateAsAllowed:
    """Two streams in which nothing moves until it is waited for, and uploads go on until the host waits for them.

    Kernels are done when they return.
    """

    last: dict[str, Later] = field(default_factory=dict)
    joined: list[Later] = field(default_factory=list)  # what kernels run behind
    uploads: list[Upload] = field(default_factory=list)

    def now(self) -> Later:
        self.joined = [each for each in self.joined if not each.is_over]
        return Later([], list(self.joined), is_done=True)

    def _put(self, stream: str, copies: Sequence[Copy], after: Later | None) -> Later:
        self._check()
        before = [each for each in (self.last.get(stream), after) if each is not None]
        self.last[stream] = Later(list(copies), before)
        return self.last[stream]

    def to_device(self, copies: Sequence[Copy], after: Later | None) -> Later:
        for into, _ in copies:
            into.view(torch.uint8).fill_(0xFF) if after is None or after.is_done else None
        mark = self._put("in", copies, after)
        self.uploads += [Upload(mark, source, source.clone()) for _, source in copies]
        return mark

    def to_host(self, copies: Sequence[Copy], after: Later | None) -> Later:
        return self._put("out", copies, after)

    def _check(self) -> None:
        self.uploads = [each for each in self.uploads if not each.by.is_over]
        for each in self.uploads:
            assert each.is_whole(), "somebody wrote to the source of a copy that is still under way"

    def _run(self, mark: Later) -> list[Later]:
        self._check()
        order = mark.open()
        for each in order:
            if not each.is_done:
                for into, source in each.copies:
                    into.copy_(source)
                    self._allow(each, into)
                each.is_done = True
        return order

    def _allow(self, by: Later, into: torch.Tensor) -> None:
        """What a copy wrote to the sources of uploads that it is behind, or that are behind it."""
        at, end, kept = into.data_ptr(), into.data_ptr() + into.nbytes, []
        for each in self.uploads:
            is_apart = each.source.data_ptr() >= end or each.source.data_ptr() + each.source.nbytes <= at
            if not is_apart and each.by in by.open():
                continue
            if not is_apart and by in each.by.open():
                each = each._replace(kept=each.source.clone())
            kept.append(each)
        self.uploads = kept

    def wait(self, mark: Later | None) -> None:
        if mark is not None:
            self._run(mark)
            self.joined.append(mark)

    def synchronize(self, mark: Later | None) -> None:
        if mark is not None:
            for each in self._run(mark):
                each.is_over, each.before = True, []


@contextmanager
def as_on_a_gpu(streams: type[CopyStreams]) -> Iterator[None]:
    """Params on the CPU are offloaded as those on a GPU are: by the same stores, with these streams."""

    def beside(rests: Offload | None, tuning: Any, device: torch.device, kept: Kept | None = None) -> Any:
        if rests is None:
            return tiers.make_store(rests, tuning, device)
        return tiers._gpu_store(CPU, streams(), rests, tuning, kept or Kept())

    def landing(rests: Offload | None, device: torch.device) -> Any:
        if rests is None or rests.gradients is None:
            return None
        return HostLanding(CPU, streams(), tiers._pages(rests, CPU))

    def offloads_params(offload: Offload | None, device: torch.device) -> bool:
        return offload is not None and offload.params is not None

    def near(offload: Offload, device: torch.device, beside: Store) -> NearStore:
        return NearStore(zeros, not beside.is_final, None if offload.gradients is None else streams())

    with ExitStack() as stack:
        for module in ("domain", "relocate"):
            stack.enter_context(patch(f"shardopt.domain.{module}.make_store", beside))
            stack.enter_context(patch(f"shardopt.domain.{module}.make_near_store", near))
        stack.enter_context(patch("shardopt.domain.bind.make_landing", landing))
        stack.enter_context(patch("shardopt.domain.tiers.register_with_cuda", None))
        for module in ("domain.bind", "domain.relocate"):
            stack.enter_context(patch(f"shardopt.{module}.check_offload", lambda rests, *_: None))
        stack.enter_context(patch("shardopt.domain.domain.offloads_params", offloads_params))
        yield
