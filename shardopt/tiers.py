"""Which store an optimizer's states rest in: the only place that knows all of them."""

import os
from pathlib import Path

import torch

from .config import Offload, Options, Tuning
from .errors import BindingError
from .offload.disk import DiskStore
from .offload.mixed import MixedStore, RevocableStore
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


def make_store(rests: Offload | None, tuning: Tuning) -> Store:
    """
    Raises:
        OffloadError: the directory cannot be used.
    """
    if rests is None:
        return in_memory("device")
    away = in_memory("host") if rests.directory is None else _on_disk(rests.directory, tuning)
    return away if rests.fraction == 1 else MixedStore(away, RevocableStore("device", zeros), rests.fraction)


def _on_disk(directory: str | os.PathLike[str], tuning: Tuning) -> DiskStore:
    return DiskStore(Path(directory), tuning.chunk_bytes, tuning.timeout or _PATIENCE)


def check_offload(options: Options, device: torch.device) -> None:
    """Raises BindingError where states of params on this device cannot be offloaded."""
    if options.rests is not None and device.type != "cpu":
        raise BindingError(
            f"offload= was given and params are on {device}: so far only states of params on a CPU can rest elsewhere, "
            "so these would stay on the device. Leave offload= away, or keep the model on the CPU."
        )
