"""Which store an optimizer's states rest in: the only place that knows all of them."""

import torch

from .config import Offload, Tuning
from .errors import BindingError
from .offload.disk import DiskStore
from .offload.lanes import CudaLanes
from .offload.mixed import MixedStore, RevocableStore
from .offload.pinned import Pages, register_with_cuda
from .offload.ring import RingStore
from .offload.store import ResidentStore, Store
from .partition.room import zeros

# Seconds that a disk may take for one transfer before it is given up, where Tuning.timeout says nothing.
_PATIENCE = 300.0


def in_memory(tier: str) -> ResidentStore:
    return ResidentStore(tier, zeros)


def tier_of(rests: Offload | None) -> str:
    """ "device", "host" or "disk"."""
    if rests is None:
        return "device"
    return "host" if rests.directory is None else "disk"


def make_store(rests: Offload | None, tuning: Tuning, device: torch.device) -> Store:
    """
    Raises:
        OffloadError: the directory cannot be used.
    """
    if rests is None:
        return in_memory("device")
    away: Store
    if rests.directory is not None:
        away = DiskStore(rests.directory, tuning.chunk_bytes, tuning.timeout or _PATIENCE)
    elif device.type == "cpu":
        away = in_memory("host")
    else:
        away = _ring(rests, tuning, device)
    return away if rests.fraction == 1 else MixedStore(away, RevocableStore("device", zeros), rests.fraction)


def _ring(rests: Offload, tuning: Tuning, device: torch.device) -> RingStore:
    pages = Pages(
        lambda numel, dtype: zeros(numel, dtype, torch.device("cpu")),
        register_with_cuda if rests.pin_memory else None,
    )
    return RingStore(device, CudaLanes(device), pages, tuning.chunk_bytes)


def check_offload(rests: Offload | None, device: torch.device) -> None:
    """Raises BindingError where states of params on this device cannot be offloaded like this."""
    if rests is None:
        return
    wrong, instead = None, ""
    if device.type == "cpu":
        if rests.step == "gpu":
            wrong, instead = "step='gpu' has none to run on", "Leave step away, or move the model to a GPU"
    elif rests.directory is not None:
        wrong, instead = (
            "a directory serves states that a CPU updates, so far",
            "Give 'cpu', or keep the model on the CPU",
        )
    elif rests.step == "cpu":
        wrong, instead = "step='cpu' is not there yet for params on a GPU", "Leave step away: the GPU takes it"
    elif rests.gradients is not None or rests.params is not None:
        wrong, instead = "gradients and params of a GPU stay there, so far", "Leave gradients= and params= away"
    if wrong is not None:
        raise BindingError(f"offload={rests!r} and params on {device}: {wrong}, so nothing was bound. {instead}.")
