"""The process group that carries what lies in host memory: beside the device and its queue.

NCCL carries tensors of a GPU alone. What ranks agree on would be copied there, wait until the device has done all
queued work, and be copied back. And a rank that leaves could notify no other one: these wait for its collectives. So a
group without a backend for host memory gets a gloo group beside it, of the same ranks::

    init_process_group("nccl")                  a gloo group of our own, made at the first message
    init_process_group("cpu:gloo,cuda:nccl")    the group itself
    init_process_group()                        the group itself
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from .notes import note_of

if TYPE_CHECKING:
    from datetime import timedelta

_CPU = torch.device("cpu")
_MAKING = threading.Lock()  # two threads at once would each make a group, and ranks could connect unlike ones


class _Beside:
    """The gloo group beside a group: one for all optimizers, which goes with the process group.

    Test: test_one_group_beside_goes_with_its_group in tests/partition/test_host_group.py.
    """

    gloo: dist.ProcessGroup | None = None


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group that carries host memory. Collective at the first call for a group that carries none.

    Raises:
        RuntimeError: gloo cannot connect the ranks.
    """
    if backend_of(group, _CPU) is not None:
        return group
    with _MAKING:
        beside = note_of(group, _Beside)
        if beside.gloo is None:
            beside.gloo = _gloo_beside(group)
        return beside.gloo


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the backend for tensors of this device; None if the group has none."""
    # Not dist.get_backend(): a group made without a backend's name has one backend for each kind of device.
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the longest time that one wait of the host in the group may take."""
    backend = backend_of(group, _CPU)
    if backend is None:
        backend = next((backend_of(group, each) for each in group._device_types), None)
    timeout: timedelta = getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)
    return timeout


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    # Not dist.new_group(): all ranks of the default group must call it, who may not all have this optimizer; and with
    # use_local_synchronization=True ranks that are in unequal numbers of groups wait for each other for ever.
    # Test: test_ranks_in_unequal_numbers_of_groups in tests/partition/test_host_group.py.
    store = PrefixStore("shardopt", group.get_group_store())
    found = dist.ProcessGroup(store, group.rank(), group.size())
    gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout_of(group))
    found._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    return found
