"""Connects the ranks of a domain at its first binding, and opens to each other what they allocated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..partition.comm.transport import Transport
from ..partition.reducer import Reducer
from ..units.gatherer import Gatherer
from .domain import Links
from .model_units import gathering_budget
from .remote_states import RemoteStates
from .sharded_params import ShardedParams

if TYPE_CHECKING:
    from ..offload.gradients import HostLanding
    from ..partition.comm.group import Ranks
    from ..partition.comm.holders import Holders
    from .allocate import AllocatedBucket
    from .domain import Domain


def connect(domain: Domain, device: torch.device, landing: HostLanding | None, undo: ExitStack) -> Links:
    """Collective: chooses how the ranks reach each other.

    Args:
        landing: the host memory of sums of gradients.
        undo: closes what was opened if the ranks do not agree.
    """
    options, tuning, mesh = domain.options, domain.options.tuning, domain.mesh
    shards, replicas = (
        Transport.of(ranks, device, tuning.neighbours, tuning.by_host) for ranks in (mesh.shard, mesh.replicate)
    )
    is_coded = isinstance(options.reduce_dtype, str)
    reducer = None if options.module is None else Reducer(mesh, shards, replicas, is_coded)
    sharded = None
    if domain.shards_params:
        # Offloaded params lie in no memory that other ranks could read, and encoded ones are messages.
        is_apart = domain.offloads_params(device) or options.gather_dtype is not None
        transport = Transport(mesh.shard, device) if is_apart else shards
        shared = domain.leader.gatherer if domain.leader is not None else None
        if shared is None:
            # With a norm_group, backwards of other micro-batches of a pipeline follow.
            is_pipeline = options.norm_group is not None
            budget = gathering_budget(tuning, transport.overlaps)
            waiting = partial(domain.clock.phase, "unshard")
            gatherer = Gatherer(budget, waiting, is_pipeline, tuning.compare_gathered)
        else:
            gatherer = shared
        of_domain = (transport, domain.gather, domain.gather_slices, domain.fetcher, domain.name_of)
        holders = _holders(tuning.reshard_after_forward, mesh.shard, transport, of_experts=shared is not None)
        sharded = ShardedParams(gatherer, *of_domain, leads=shared is None, holders=holders)
    remote = RemoteStates.connect(domain) if mesh.shard.size > 1 else None
    if remote is not None:
        undo.callback(remote.close)
    return Links(shards, replicas, reducer, landing, sharded, remote)


def _holders(asked: object, ranks: Ranks, transport: Transport, of_experts: bool) -> Holders | None:
    if isinstance(asked, bool):
        return None
    from .holding import members_of  # here, as nearly no training has holders

    members = members_of(asked, ranks, of_experts)
    return None if members is None else transport.holders(members)


def open_windows(links: Links, made: Sequence[AllocatedBucket]) -> None:
    """Collective: exchanges the addresses of what each rank allocated."""
    for each in made:
        bucket = each.shard.bucket
        if each.own is None:
            each.window = replace(links.shards.open(bucket.flat, bucket.layout.shard_numel), code=each.code)
        if each.sums is not None:
            assert links.reducer is not None
            each.sums_window = links.reducer.window(each.sums)
    for each in made:
        if each.own is not None:
            assert links.sharded is not None
            each.window = replace(links.sharded.window(each.shard.bucket, each.own), code=each.code)
            each.secondary = links.sharded.secondary(each.window)
