"""Host memory is registered with CUDA, or stays pageable: without a trace in the steps that follow.

There is no CUDA here. A stand-in for its runtime keeps what CUDA keeps, and answers torch's calls for it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import Parameter

from shardopt import Offload, ShardedAdamW, huge_pages
from shardopt.domain import tiers
from shardopt.offload import pinned
from tests.support.late_copies import AtOnce, as_on_a_gpu
from tests.support.training import raw

_ones = torch.ones


class Runtime:
    """The CUDA runtime of one thread. A call that fails is its last error until a kernel launch reads it."""

    def __init__(self, refuses: bool):
        self.refuses, self.last_error = refuses, 0
        self.registered: set[int] = set()
        self.nbytes = 0  # of the last one that was registered
        self.current = 0
        self.calls: list[tuple[Any, ...]] = []  # what was called, and the device that was the current one

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Takes the place of torch.cuda.device."""
        before, self.current = self.current, device.index
        yield
        self.current = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", self.current, flags))
        if not self.refuses:
            self.registered.add(address)
            self.nbytes = nbytes
        return self._end(801 * self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("give back", self.current))
        self.registered.discard(address)
        return self._end(713 * self.refuses)

    def _end(self, code: int) -> int:
        self.last_error = code or self.last_error
        return code

    def launch(self) -> None:
        """As torch does behind each launch of a kernel."""
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def ones(self, *size: int, device: Any = None, **keywords: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            self.launch()
            device = None
        return _ones(*size, device=device, **keywords)


@contextmanager
def on_a_gpu(runtime: Runtime) -> Iterator[None]:
    """Within, params on the CPU are offloaded as those on a GPU with this runtime are; copies launch as kernels do."""

    class Launching(AtOnce):
        def now(self) -> None:
            runtime.launch()

    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu(Launching))
        stack.enter_context(patch("shardopt.domain.tiers.register_with_cuda", pinned.register_with_cuda))
        stack.enter_context(patch("torch.cuda.cudart", lambda: runtime))
        stack.enter_context(patch("torch.ones", runtime.ones))
        yield


def trained(runtime: Runtime) -> bytes:
    param = Parameter(torch.zeros(1 << 16))
    with on_a_gpu(runtime):
        optimizer = ShardedAdamW([param], lr=0.5, offload=Offload(step="gpu"))
        for value in (1.0, -2.0):
            param.grad = torch.full_like(param, value)
            optimizer.step()
        optimizer.close()
        runtime.launch()
    return raw(param)


def test_memory_that_cannot_be_pinned_fails_no_later_launch() -> None:
    able, unable = Runtime(refuses=False), Runtime(refuses=True)
    expected = trained(able)
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert trained(unable) == expected
    assert not able.registered


def test_memory_that_cannot_be_given_back_fails_no_later_launch() -> None:
    runtime = Runtime(refuses=False)
    with on_a_gpu(runtime):
        pages = pinned.Pages(lambda numel, dtype: torch.zeros(numel, dtype=dtype), pinned.register_with_cuda)
        pages._registered[4096] = torch.empty(4096, dtype=torch.uint8)
        runtime.refuses = True
        del pages
        assert [call for call, *_ in runtime.calls] == ["give back"]
        runtime.launch()


def test_pages_belong_to_the_params_gpu() -> None:
    """Whatever device is the current one: nobody may have called set_device()."""
    runtime = Runtime(refuses=False)
    with (
        patch("torch.cuda.cudart", lambda: runtime),
        patch("torch.cuda.device", runtime.device),
        patch("torch.cuda.synchronize"),
    ):
        pages = tiers._pages(Offload(), torch.device("cuda", 3))
        tensors = [pages.zeros(1 << 16, torch.float32) for _ in range(2)]
        pages.give_back(tensors[:1])
        del pages
    assert runtime.calls == 2 * [("register", 3, 1)] + 2 * [("give back", 3)] and not runtime.registered


def test_dropped_pages_stay_until_copies_have_ended() -> None:
    """Whoever drops an optimizer without closing it drops its streams too, in any order."""
    runtime, found = Runtime(refuses=False), []

    def synchronize(device: torch.device) -> None:
        found.append((device.index, is_mapped(address), address in runtime.registered))

    with (
        patch("torch.cuda.cudart", lambda: runtime),
        patch("torch.cuda.device", runtime.device),
        patch("torch.cuda.synchronize", synchronize),
    ):
        pages = tiers._pages(Offload(), torch.device("cuda", 3))
        address = pages.zeros(1 << 20, torch.float32).data_ptr()  # dropped at once
        del pages
    assert found == [(3, True, True)] and not runtime.registered and address not in huge_pages._MAPPINGS


def flags(address: int) -> list[str]:
    """What the system keeps for the mapping that holds the address; "dc" is "do not copy on fork"."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and ":" not in first:
            low, high = (int(each, 16) for each in first.split("-"))
            is_there = low <= address < high
        elif first == "VmFlags:" and is_there:
            return rest
    raise AssertionError(f"nothing is mapped at {address:x}")


def in_a_fork(look: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        found = 2
        try:
            found = int(look())
        finally:
            os._exit(found)
    return {0: False, 1: True}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def is_mapped(address: int) -> bool:
    bounds = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in bounds)


def test_a_fork_copies_no_pinned_page() -> None:
    runtime = Runtime(refuses=False)
    with patch("torch.cuda.cudart", lambda: runtime):
        pages = tiers._pages(Offload(), torch.device("cpu"))
        tensor = pages.zeros(1 << 20, torch.float32).fill_(3.0)
        address = tensor.data_ptr()
        assert pages.pinned_bytes == 4 << 20 and "dc" in flags(address)
        assert not in_a_fork(lambda: is_mapped(address))
        pages.give_back([tensor])
        assert "dc" not in flags(address)
        assert in_a_fork(lambda: is_mapped(address) and float(tensor[0]) == float(tensor[-1]) == 3.0)


def test_a_fork_gets_pages_that_others_use_too() -> None:
    """A tensor of the heap may lie on whole pages by chance; what is beside it there must not be missing in a child."""
    runtime = Runtime(refuses=False)
    heap = torch.zeros(1 << 16, dtype=torch.uint8)
    start = -heap.data_ptr() % 4096
    with patch("torch.cuda.cudart", lambda: runtime):
        pages = pinned.Pages(lambda numel, _: heap[start : start + numel], pinned.register_with_cuda)
        tensor = pages.zeros(8192, torch.uint8)
        assert pages.pinned_bytes == 8192 and "dc" not in flags(tensor.data_ptr())
        del pages


def test_ranks_of_a_machine_share_what_may_be_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(str(40 << 20))
    monkeypatch.setattr(pinned, "_CGROUP", limit)
    runtime = Runtime(refuses=False)
    for ranks, most in ((None, 36), ("1", 36), ("4", 9), ("no number", 36)):
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with patch("torch.cuda.cudart", lambda: runtime):
            pages = tiers._pages(Offload(), torch.device("cpu"))
            kept = [pages.zeros(most << 18, torch.float32)]
            with pytest.warns(UserWarning, match="could not be pinned"):
                kept.append(pages.zeros(1 << 18, torch.float32))
            assert pages.pinned_bytes == most << 20
            del pages
