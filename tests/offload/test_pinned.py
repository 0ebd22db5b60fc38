"""Host memory is registered with CUDA, or stays pageable: without a trace in the steps that follow.

There is no CUDA here. A stand-in for its runtime keeps what CUDA keeps, and answers torch's calls for it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import Parameter

from shardopt import Offload, ShardedAdamW
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
        pages._registered[4096] = 4096
        runtime.refuses = True
        del pages
        runtime.launch()


def test_pages_belong_to_the_params_gpu() -> None:
    """Whatever device is the current one: nobody may have called set_device()."""
    runtime = Runtime(refuses=False)
    with patch("torch.cuda.cudart", lambda: runtime), patch("torch.cuda.device", runtime.device):
        pages = tiers._pages(Offload(), torch.device("cuda", 3))
        tensors = [pages.zeros(1 << 16, torch.float32) for _ in range(2)]
        pages.give_back(tensors[:1])
        del pages
    assert runtime.calls == 2 * [("register", 3, 1)] + 2 * [("give back", 3)] and not runtime.registered
