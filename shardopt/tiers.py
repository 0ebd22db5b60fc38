"""Which store an optimizer's states rest in: the only place that knows all of them."""

import torch

from .config import Options
from .errors import BindingError
from .offload.disk import DiskStore
from .offload.store import ResidentStore, Store
from .partition.room import zeros

# Seconds that a disk may take for one transfer before it is given up, where Tuning.timeout says nothing.
_PATIENCE = 300.0


def in_memory(tier: str) -> ResidentStore:
    return ResidentStore(tier, zeros)


def tier_of(options: Options) -> str:
    """ "device", "host" or "disk"."""
    if options.rests is None:
        return "device"
    return "host" if options.rests.directory is None else "disk"


def make_store(options: Options) -> Store:
    """
    Raises:
        OffloadError: the directory cannot be used.
    """
    if options.rests is None or options.rests.directory is None:
        return in_memory(tier_of(options))
    return DiskStore(options.rests.directory, options.tuning.chunk_bytes, options.tuning.timeout or _PATIENCE)


def check_offload(options: Options, device: torch.device) -> None:
    """Raises BindingError where states of params on this device cannot be offloaded."""
    if options.rests is not None and device.type != "cpu":
        raise BindingError(
            f"offload= was given and params are on {device}: so far only states of params on a CPU can rest elsewhere, "
            "so these would stay on the device. Leave offload= away, or keep the model on the CPU."
        )
