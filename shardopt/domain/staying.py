"""Chooses the shards whose states stay on the device while the rest is offloaded: ``Offload(fraction=)``.

The first buckets of backward stay, whole ones. With ``fraction="auto"`` all states are offloaded at first. After the
second step the peak of the device is known, and what it left free is filled on all ranks alike.
"""

from __future__ import annotations

import logging
import re
import resource
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import CommunicationError
from ..machine import ranks_here
from ..offload.pinned import memory_limit
from .agreement import agree_on_call
from .formats import itemsize_of
from .relocate import copy_streams

if TYPE_CHECKING:
    from ..offload.store import ShardStorage
    from .bucket_plan import PlannedBucket
    from .domain import Domain


STEPS = 2  # until the peak is known: the first one compiles kernels, and makes states and buffers
_SPARE = 16  # one part in so many of the memory stays free: allocators leave gaps

_log = logging.getLogger("shardopt")


def bytes_of_states(planned: PlannedBucket) -> float:
    """Returns the bytes of masters and states of one rank's slice of a bucket."""
    formats = [planned.formats.master, *(planned.formats.states[name] for name in planned.states)]
    return planned.layout.shard_numel * sum(map(itemsize_of, formats))


def num_staying(nbytes: Sequence[float], fraction: float) -> int:
    """Returns how many of the first buckets stay: what is offloaded comes as near to the fraction as whole ones can."""
    stays, at_most = 0.0, (1 - fraction) * sum(nbytes)
    for number, each in enumerate(nbytes):
        if stays + each / 2 > at_most:
            return number
        stays += each
    return len(nbytes)


def num_fitting(nbytes: Sequence[int], room: int) -> int:
    """Returns how many of the first shards fit into so many bytes."""
    for number, each in enumerate(nbytes):
        room -= each
        if room < 0:
            return number
    return len(nbytes)


# -- fraction="auto" ---------------------------------------------------------------------------------------------------


def fill_device(domain: Domain) -> None:
    """Collective, after a step: takes back the states of as many of the first buckets as every rank has room for.

    The step is taken: where a rank cannot read its states, they stay offloaded on all ranks, which a warning tells.
    """
    if domain.steps_agreed < STEPS or domain.is_away:
        return
    domain.awaits_room = False
    nbytes, room = [sum(shard.home.nbytes.values()) for shard in domain.shards], room_on(domain.device)
    rows = domain.mesh.world.exchange([num_fitting(nbytes, room)], "counting the states that devices have room for")
    shards = domain.shards[: min(fitting for (fitting,) in rows)]
    homes: list[ShardStorage] = []

    def read() -> dict[str, int]:
        near = domain.store_for(domain.device, stays=True)
        for shard in shards:
            homes.append(near.home(shard.numel, shard.dtype, shard.device))
            copy_streams(shard, homes[-1])
        return {"buckets": len(shards)}

    try:
        agree_on_call("taking states back", read, domain.mesh.world)
    except CommunicationError:
        raise
    except (RuntimeError, MemoryError) as error:  # raised, it would make a script repeat a step that all have taken
        warnings.warn(
            f'give a fraction in place of Offload(fraction="auto"): all states stay offloaded. {error}', stacklevel=2
        )
        return
    for left in domain.take_back(shards, homes):
        left.release()
    taken = sum(nbytes[: len(shards)])
    _log.info(
        "shardopt: %d bytes of masters and states stay on the device from now on, %d are offloaded",
        taken,
        sum(nbytes) - taken,
    )


def room_on(device: torch.device) -> int:
    """Returns the bytes that were free at the peak so far of the device, or of this process's memory."""
    if device.type == "cpu":
        most, peak = memory_limit(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return min(most - peak, _available() // ranks_here()) - most // _SPARE
    free, most = torch.cuda.mem_get_info(device)
    may_have = free + torch.cuda.memory_reserved(device)  # what others take of the device is not ours to fill
    return may_have - torch.cuda.max_memory_allocated(device) - most // _SPARE


def _available() -> int:
    """Returns the bytes of the machine's memory that nobody uses, as far as the system says it."""
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found is not None:
            return int(found[1]) * 1024
    return memory_limit()
