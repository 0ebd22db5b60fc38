"""How the ranks of a domain are joined at its first binding, and how what they allocated is opened to each other."""

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
from .remote_states import Exhibit
from .sharded_params import ShardedParams


@dataclass(frozen=True)
class Windows:
    """By what was made: on its params, and on its sums of gradients (None: nobody else looks at them)."""

    params: dict[Made, Window] = field(default_factory=dict)
    sums: dict[Made, Window | None] = field(default_factory=dict)


def connect(domain: Domain, device: torch.device, landing: HostLanding | None, undo: ExitStack) -> Links:
    """Collective: chooses how the ranks reach each other.

    Args:
        landing: where sums of gradients rest.
        undo: takes what must be closed if the ranks do not come to an agreement.
    """
    options, tuning, mesh = domain.options, domain.options.tuning, domain.mesh
    shards, replicas = (Transport.of(ranks, device, tuning.neighbours) for ranks in (mesh.shard, mesh.replicate))
    reducer = None if options.module is None else Reducer(mesh, shards, replicas)
    sharded = None
    if Placements.of_stage(options.stage).param is Placement.SHARD:
        # What rests elsewhere is in no memory that others could read.
        wires = Transport(mesh.shard, device) if domain.params_rest(device) else shards
        gatherer = Gatherer(wires, tuning.live_bytes)
        sharded = ShardedParams(gatherer, domain.gather, domain.fetcher, domain.name_of)
    exhibit = None
    if mesh.shard.size > 1:
        exhibit = Exhibit.begin(domain)
        if exhibit is not None:
            undo.callback(exhibit.close)
    return Links(shards, replicas, reducer, landing, sharded, exhibit)


def open_windows(links: Links, made: Sequence[Made]) -> Windows:
    """Collective: tells the ranks where each of them keeps what was made."""
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
