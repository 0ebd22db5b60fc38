"""Connects the ranks of a domain at its first binding, and opens to each other what they allocated."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ..offload.gradients import HostLanding
from ..partition.comm.all_gather import Window
from ..partition.comm.transport import Transport
from ..partition.gatherer import Gatherer
from ..partition.placement import Placement, Placements
from ..partition.reducer import Reducer
from .allocate import Made
from .domain import Domain, Links
from .remote_states import RemoteStates
from .sharded_params import ShardedParams
from .units import gathering_budget


@dataclass(frozen=True)
class Windows:
    """The windows on the params and on the sums of gradients of each bucket (None: no other rank reads the sums)."""

    params: dict[Made, Window] = field(default_factory=dict)
    sums: dict[Made, Window | None] = field(default_factory=dict)


def connect(domain: Domain, device: torch.device, landing: HostLanding | None, undo: ExitStack) -> Links:
    """Collective: chooses how the ranks reach each other.

    Args:
        landing: the host memory of sums of gradients.
        undo: closes what was opened if the ranks do not agree.
    """
    options, tuning, mesh = domain.options, domain.options.tuning, domain.mesh
    shards, replicas = (Transport.of(ranks, device, tuning.neighbours) for ranks in (mesh.shard, mesh.replicate))
    reducer = None if options.module is None else Reducer(mesh, shards, replicas)
    sharded = None
    if Placements.of_stage(options.stage).param is Placement.SHARD:
        # Offloaded params lie in no memory that other ranks could read.
        transport = Transport(mesh.shard, device) if domain.offloads_params(device) else shards
        gatherer = Gatherer(transport, gathering_budget(tuning, transport.overlaps))
        sharded = ShardedParams(gatherer, domain.gather, domain.fetcher, domain.name_of)
    remote = RemoteStates.meet(domain) if mesh.shard.size > 1 else None
    if remote is not None:
        undo.callback(remote.close)
    return Links(shards, replicas, reducer, landing, sharded, remote)


def open_windows(links: Links, made: Sequence[Made]) -> Windows:
    """Collective: tells all ranks where each of them keeps what it made."""
    windows = Windows()
    for each in made:
        bucket = each.shard.bucket
        if each.own is None:
            windows.params[each] = links.shards.open(bucket.flat, bucket.layout.shard_numel)
        if each.sums is not None:
            assert links.reducer is not None
            windows.sums[each] = links.reducer.window(each.sums)
    for each in made:
        if each.own is not None:
            assert links.sharded is not None
            windows.params[each] = links.sharded.gatherer.window(each.shard.bucket, each.own)
    return windows
