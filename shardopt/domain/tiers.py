"""Which store an optimizer's states rest in: the only place that knows all of them."""

from pathlib import Path

import torch

from ..config import Offload, Tuning
from ..errors import BindingError
from ..offload.cpu_step import CpuStepStore
from ..offload.disk.store import DiskStore
from ..offload.gradients import HostLanding
from ..offload.host import HostStore
from ..offload.measured import MeasuredStore
from ..offload.pinned import Pages, register_with_cuda
from ..offload.ring import RingStore
from ..offload.store import ResidentStore, Store
from ..offload.streams import CopyStreams, CudaCopyStreams
from ..partition.memory import zeros

# Seconds that a disk may take for one transfer before it is given up, where Tuning.timeout says nothing.
_PATIENCE = 300.0


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
        return ResidentStore("device", zeros)
    return (
        _beside_cpu(rests, tuning) if device.type == "cpu" else _beside(device, CudaCopyStreams(device), rests, tuning)
    )


def make_landing(rests: Offload | None, device: torch.device) -> HostLanding | None:
    """For sums of gradients on this device that rest in host memory; None: they stay."""
    if rests is None or rests.gradients is None or device.type == "cpu":
        return None
    return HostLanding(device, CudaCopyStreams(device), _pages(rests))


def _beside_cpu(rests: Offload, tuning: Tuning) -> Store:
    return ResidentStore("host", zeros) if rests.directory is None else _disk(rests.directory, tuning)


def _disk(directory: Path, tuning: Tuning) -> DiskStore:
    return DiskStore(directory, tuning.chunk_bytes, tuning.timeout or _PATIENCE)


def _beside(device: torch.device, streams: CopyStreams, rests: Offload, tuning: Tuning) -> Store:
    """For params that are not in the host's memory."""
    pages = _pages(rests)
    if rests.directory is not None:
        return CpuStepStore(streams, pages, _disk(rests.directory, tuning))
    host = HostStore(pages, tuning.chunk_bytes)
    if rests.step == "gpu":
        return RingStore(device, streams, host)
    if rests.step == "cpu":
        return CpuStepStore(streams, pages, host)
    return MeasuredStore(
        streams, host, {"gpu": RingStore(device, streams, host), "cpu": CpuStepStore(streams, pages, host)}
    )


def _pages(rests: Offload) -> Pages:
    return Pages(
        lambda numel, dtype: zeros(numel, dtype, torch.device("cpu")),
        register_with_cuda if rests.pin_memory else None,
    )


def params_rest(rests: Offload | None, device: torch.device) -> bool:
    """Whether slices of sharded params on this device rest where masters and states do."""
    if rests is None or rests.params is None:
        return False
    return rests.params != "cpu" or device.type != "cpu"


def check_offload(rests: Offload | None, device: torch.device, copies: int = 1) -> None:
    """Raises BindingError where states of params on this device cannot be offloaded like this.

    Args:
        copies: of the states: more than one on a mesh of (replicate, shard).
    """
    if rests is None:
        return
    wrong, instead = None, ""
    if device.type == "cpu":
        if rests.step == "gpu":
            wrong, instead = "step='gpu' has none to run on", "Leave step away, or move the model to a GPU"
    elif rests.directory is not None and rests.step == "gpu":
        wrong, instead = "what is read from a disk is updated by the CPU", "Leave step away, or give 'cpu' as states"
    elif rests.gradients is not None and copies > 1:
        wrong, instead = (
            f"sums of gradients are added up over {copies} copies of the states on the GPU, all of them at once",
            "Leave gradients= away, or give a process_group of one copy",
        )
    elif rests.directory is not None and rests.params == "cpu":
        wrong, instead = (
            "params that leave it rest where their masters do",
            "Give params= the directory as well, or leave it away",
        )
    if wrong is not None:
        raise BindingError(f"offload={rests!r} and params on {device}: {wrong}, so nothing was bound. {instead}.")
