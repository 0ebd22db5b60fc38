"""Pinned host memory, which a GPU copies at the speed of the bus: pages of our own, registered with CUDA.

torch's pinned allocator rounds every request up to a power of two, nearly twice the bytes at worst. Memory stays
pageable where registering fails, or would leave the system too little that it can reclaim: copies are slower then, the
bits the same.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from ..huge_pages import show_to_forks
from ..machine import ranks_here

_PAGE = 4096  # bytes
# Share of the machine's memory that all optimizers of all of its ranks may pin. The system cannot reclaim pinned pages.
_MOST_PINNED = 0.9
_ALONE = 2  # references to a storage: of the one tensor that has it, and of the Python object that asks
_PORTABLE = 1  # pinned for every GPU of the process: a flag of cudaHostRegister
_CGROUP = Path("/sys/fs/cgroup/memory.max")

_ALL: "weakref.WeakSet[Pages]" = weakref.WeakSet()


class Pages:
    """Makes streams in host memory and pins them.

    Registering a byte takes longer than moving it over the bus. So memory that a store is done with stays registered
    (``keep``), and the next stream of as many bytes has it.
    """

    def __init__(
        self,
        zeros: Callable[[int, torch.dtype], torch.Tensor],
        register: Callable[[int, int], bool] | None,
        device: torch.device | None = None,
    ):
        """
        Args:
        zeros: makes 1D tensors in host memory.
        register: registers (address, bytes) with the GPU; True if that worked. None: nothing is registered.
        device: the GPU; None: the current one.
        """
        self._make, self._register, self._device = zeros, register, device
        # By address: memory must not be freed before it is unregistered.
        self._registered: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []  # those of them that wait for a stream
        self._has_warned = False
        _ALL.add(self)
        weakref.finalize(self, _give_back_unused, device, self._registered).atexit = False

    @property
    def pinned_bytes(self) -> int:
        return sum(each.nbytes for each in self._registered.values())

    @property
    def spare_bytes(self) -> int:
        return sum(each.nbytes for each in self._spare)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        spare = self._take(numel * dtype.itemsize)
        return self._fresh(numel, dtype) if spare is None else spare.view(torch.uint8).view(dtype).zero_()

    def unfilled(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Like ``zeros``, for who writes all of it before anybody reads it: spare memory is not zeroed."""
        spare = self._take(numel * dtype.itemsize)
        return self._fresh(numel, dtype) if spare is None else spare.view(torch.uint8).view(dtype)

    def _fresh(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._make(numel, dtype)
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        # A smaller tensor shares its pages with others.
        if self._register is None or nbytes < _PAGE or address % _PAGE:
            return tensor
        most = _MOST_PINNED * memory_limit()
        if sum(each.pinned_bytes for each in _ALL) + nbytes > most:
            self.free_spare()
        pinned = sum(each.pinned_bytes for each in _ALL)
        if pinned + nbytes <= most and self._registers(address, nbytes):
            self._registered[address] = tensor
            # A fork copies all pages that are pinned, at once: as many bytes again for each worker of a DataLoader.
            # Test: test_a_fork_copies_no_pinned_page in tests/offload/test_pinned.py.
            show_to_forks(address, False)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "raise the limits of locked memory (ulimit -l) or of the container, or, for offloading, give "
                f"Offload(pin_memory=False): {nbytes} bytes of host memory could not be pinned, beside {pinned} that "
                "are, so copies to and from the GPU are slower.",
                stacklevel=2,
            )
        return tensor

    def _registers(self, address: int, nbytes: int) -> bool:
        assert self._register is not None
        with _on(self._device):
            return self._register(address, nbytes)

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Returns spare memory of this size that nobody else refers to.

        What somebody does refer to, a tensor that was read before say, is given up: it would be written over.
        """
        for index in reversed([index for index, each in enumerate(self._spare) if each.nbytes == nbytes]):
            spare = self._spare.pop(index)
            if torch._C._storage_Use_Count(spare.untyped_storage()._cdata) <= _ALONE:
                return spare
            self.give_back([spare])
        return None

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes tensors that no copy and no store uses any more. Those that are pinned stay so."""
        for tensor in tensors:
            registered = self._registered.get(tensor.data_ptr())
            if registered is not None and not any(each is registered for each in self._spare):
                self._spare.append(registered)

    def free_spare(self) -> None:
        """Unpins what waits for a stream, and frees it."""
        spare, self._spare = self._spare, []
        self.give_back(spare)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Unpins tensors that no copy uses any more. Their memory lives as long as somebody refers to it."""
        for tensor in tensors:
            registered = self._registered.pop(tensor.data_ptr(), None)
            if registered is not None:
                _give_back(self._device, {tensor.data_ptr(): registered})


def _on(device: torch.device | None) -> AbstractContextManager[Any]:
    """A context of calls for this GPU.

    The runtime takes the current one, which is GPU 0 on every rank of a script that never calls set_device(): the
    memory would belong to a context there. Test: test_pages_belong_to_the_params_gpu in tests/offload/test_pinned.py.
    """
    return nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device)


def _give_back_unused(device: torch.device | None, registered: dict[int, torch.Tensor]) -> None:
    """Unpins what is left of pages that were dropped, once no copy can use it any more.

    An optimizer that nobody closed may leave copies under way, and these would read and write memory that is gone, or
    is another's by now. Test: test_dropped_pages_stay_until_copies_have_ended in tests/offload/test_pinned.py.
    """
    if registered and device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    _give_back(device, registered)


def _give_back(device: torch.device | None, registered: dict[int, torch.Tensor]) -> None:
    addresses = list(registered)
    with _on(device) if registered else nullcontext():
        _unregister(registered)
    for address in addresses:
        show_to_forks(address, True)


def memory_limit() -> int:
    """Returns the bytes that this process may use: its rank's share of the machine's, or of its container's."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or "max"
        limit = min(limit, int(_CGROUP.read_text()))
    # Without the division 8 ranks of a machine could pin 7.2 times its memory, and the system would kill processes.
    # Test: test_ranks_of_a_machine_share_what_may_be_pinned in tests/offload/test_pinned.py.
    return limit // ranks_here()


def register_with_cuda(address: int, nbytes: int) -> bool:
    return _worked(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))


def _unregister(registered: dict[int, torch.Tensor]) -> None:
    for address in list(registered):
        _worked(torch.cuda.cudart().cudaHostUnregister(address))
        del registered[address]


def _worked(code: Any) -> bool:
    """True if a call of the CUDA runtime did what it was asked for; the code of one that did not is forgotten."""
    if int(code) == 0:
        return True
    # CUDA keeps a failed call's code as the thread's last error, and torch reads it after the next kernel launch: the
    # first step after memory could not be pinned would raise. torch shows no call that forgets the code, but a launch
    # does; this one has no other use. Tests: "fails no later launch" in tests/offload/test_pinned.py.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False
