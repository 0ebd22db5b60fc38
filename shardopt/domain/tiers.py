"""Chooses the store of an optimizer's states: the only place that knows all of them.

A new tier is a store in ``offload/``, the word by which users name it (:class:`shardopt.config.Offload`), and a branch
in :func:`tier_of` and :func:`make_store`. ``opt.memory()``, checkpoints and ``opt.offload()`` ask the store. The
planner has a list of its own (``tools/ways.py``): the tiers that it has numbers for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import BindingError
from ..offload.cpu_step import CpuStepStore
from ..offload.disk.store import DiskStore
from ..offload.gradients import HostLanding
from ..offload.host import HostStore
from ..offload.kept import Kept
from ..offload.measured import MeasuredStore
from ..offload.pinned import Pages, register_with_cuda
from ..offload.ring import RingStore
from ..offload.store import ResidentStore
from ..offload.streams import CopyStreams
from ..partition.memory import zeros

if TYPE_CHECKING:
    from ..config import Offload, Tuning
    from ..offload.store import Store

# Seconds that one transfer of a disk may take, where Tuning.timeout is not set. Without a limit a disk that hangs would
# hang all ranks.
_DISK_SECONDS = 300.0


def tier_of(offload: Offload | None) -> str:
    """Returns "device", "host" or "disk"."""
    if offload is None:
        return "device"
    return "host" if offload.directory is None else "disk"


def make_store(offload: Offload | None, tuning: Tuning, device: torch.device, kept: Kept | None = None) -> Store:
    """Makes the store of states for params on this device.

    Args:
        kept: what a store of the same optimizer left.

    Raises:
        OffloadError: the directory cannot be used.
    """
    if offload is None:
        return ResidentStore("device", zeros)
    if device.type == "cpu":
        return _cpu_store(offload, tuning)
    return _gpu_store(device, CopyStreams(device), offload, tuning, kept or Kept())


def for_updates(offload: Offload | None, device: torch.device, in_backward: bool) -> Offload | None:
    """Returns where states rest and how they are updated, of updates that may be made in backward.

    Those run on a GPU: a backward would wait for a CPU, bucket after bucket.
    """
    if offload is None or offload.directory is not None or offload.step != "auto" or device.type == "cpu":
        return offload
    return replace(offload, step="gpu") if in_backward or offload.early_bytes else offload


def make_near_store(offload: Offload, device: torch.device, beside: Store) -> Store:
    """Makes the store of states that stay with params on this device, beside the one that offloads the others."""
    from ..offload.near import NearStore  # where it is asked for: a fresh process imports no more than it uses

    streams = None if device.type == "cpu" or offload.gradients is None else CopyStreams(device)
    return NearStore(zeros, not beside.is_final, streams)


def make_landing(offload: Offload | None, device: torch.device) -> HostLanding | None:
    """Makes what offloads sums of gradients on this device to host memory; None: they stay."""
    if offload is None or offload.gradients is None or device.type == "cpu":
        return None
    return HostLanding(device, CopyStreams(device), _pages(offload, device))


def _cpu_store(offload: Offload, tuning: Tuning) -> Store:
    return ResidentStore("host", zeros) if offload.directory is None else _disk_store(offload.directory, tuning)


def _disk_store(directory: Path, tuning: Tuning) -> DiskStore:
    return DiskStore(directory, tuning.chunk_bytes, tuning.timeout or _DISK_SECONDS)


def _gpu_store(device: torch.device, streams: CopyStreams, offload: Offload, tuning: Tuning, kept: Kept) -> Store:
    """Makes a store for params that are on a device."""
    if offload.pin_memory not in kept.pages:
        kept.pages[offload.pin_memory] = _pages(offload, device)
    pages = kept.pages[offload.pin_memory]
    if offload.directory is not None:
        return CpuStepStore(streams, pages, _disk_store(offload.directory, tuning))
    host = HostStore(pages, tuning.chunk_bytes, streams, device)
    if offload.step == "gpu":
        return RingStore(device, streams, host)
    if offload.step == "cpu":
        return CpuStepStore(streams, pages, host)
    ring, cpu_step = RingStore(device, streams, host), CpuStepStore(streams, pages, host)
    return MeasuredStore(streams, host, {"gpu": ring, "cpu": cpu_step}, kept.seconds)


def _pages(offload: Offload, device: torch.device) -> Pages:
    return Pages(
        lambda numel, dtype: zeros(numel, dtype, torch.device("cpu")),
        register_with_cuda if offload.pin_memory else None,
        device,
    )


def offloads_params(offload: Offload | None, device: torch.device) -> bool:
    """True if slices of sharded params on this device are offloaded with masters and states."""
    if offload is None or offload.params is None:
        return False
    return offload.params != "cpu" or device.type != "cpu"


def check_offload(offload: Offload | None, device: torch.device, copies: int = 1, in_backward: bool = False) -> None:
    """Raises BindingError if states of params on this device cannot be offloaded like this.

    Args:
        copies: of the states: more than one on a mesh of (replicate, shard).
        in_backward: buckets are updated in backward (``release_gradients``).
    """
    if offload is None:
        return
    call, wrong = "", None
    if offload.early_bytes and copies > 1:
        call = "omit early_bytes=, or give a process_group of one dimension"
        wrong = f"sums are added up over {copies} copies of the states, at the end of a backward"
    elif device.type == "cpu":
        if offload.step == "gpu":
            call, wrong = "omit step=, or move the model to a GPU", "step='gpu' has none to run on"
    elif in_backward and (offload.directory is not None or offload.step == "cpu"):
        call = "give offload=Offload(step='gpu'), or omit release_gradients or offload"
        wrong = "buckets are updated in backward, which would wait for the CPU that updates them, one after the other"
    elif offload.directory is not None and offload.step == "gpu":
        call, wrong = "omit step=, or give states='cpu'", "what is read from a disk is updated by the CPU"
    elif offload.early_bytes and (offload.step == "cpu" or offload.gradients is not None):
        call = "omit early_bytes=, or step='cpu' and gradients="
        wrong = "a backward would wait for sums that come to the host, and for the CPU that updates with them"
    elif offload.gradients is not None and copies > 1:
        call = "omit gradients=, or give a process_group of one copy"
        wrong = f"sums of gradients are added up over {copies} copies of the states on the GPU, all of them at once"
    elif offload.directory is not None and offload.params == "cpu":
        call, wrong = "give params= the directory too, or omit it", "offloaded params lie where their masters do"
    if wrong is not None:
        raise BindingError(f"{call}: {wrong}, so nothing was bound: offload={offload!r}, params on {device}.")
