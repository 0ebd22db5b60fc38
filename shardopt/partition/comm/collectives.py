"""Torch's collectives of every step, asked of the process group itself.

What the functions of ``torch.distributed`` do around these calls (a log of errors, looks at arguments of scripts) takes
the host as long as the calls. Errors and labels in a profile are the backend's own, and come here as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as options


def _named(newer: str, older: str) -> str:
    return newer if hasattr(dist.ProcessGroup, newer) else older


# Renamed in torch 2.13.
_ALL_GATHER = _named("all_gather_single", "_allgather_base")
_REDUCE_SCATTER = _named("reduce_scatter_single", "_reduce_scatter_base")
_ALL_TO_ALL = _named("all_to_all_single", "alltoall_base")
# All of them ask for a work to wait for, and for a sum.
_GATHERING, _SCATTERING = options.AllgatherOptions(), options.ReduceScatterOptions()
_SUMMING, _TRADING = options.AllreduceOptions(), options.AllToAllOptions()


def all_gather(gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to gather every rank's tensor into one. Returns the work."""
    return getattr(group, _ALL_GATHER)(gathered, own, _GATHERING)


def reduce_scatter(total: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to sum every rank's parts, of which this rank gets its own. Returns the work."""
    return getattr(group, _REDUCE_SCATTER)(total, parts, _SCATTERING)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to send an equal part of a tensor to each rank. Returns the work."""
    return getattr(group, _ALL_TO_ALL)(received, sent, [], [], _TRADING)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to sum every rank's tensor in place. Returns the work."""
    return group.allreduce([tensor], _SUMMING)
