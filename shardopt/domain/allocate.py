"""Allocates on this rank what binding needs: buckets that params move into, masters and states, sums of gradients.

All of it is made before the last agreement of the ranks, and until then only the params refer to it. If memory runs out
here or on another rank, the ``ExitStack`` of the caller undoes what was made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..kernels.formats import GRADIENT_DTYPES
from ..partition.bucket import Bucket
from ..partition.gradient_buckets import DeviceSum, GradientBucket, PassingSum
from .formats import NOTHING, TRAFFIC_FORMATS
from .host_sum import HostSum
from .param import ParamRecord
from .param_state import ParamState
from .precision import exact_slice
from .shard import Shard
from .tiers import make_store

if TYPE_CHECKING:
    from ..kernels.formats import BlockFormat
    from ..offload.gradients import HostLanding
    from ..partition.comm.all_gather import ShardCode, Window
    from ..partition.layout import BucketLayout
    from ..units.secondary import SecondaryShard
    from ..units.unit import ParamShard
    from .bucket_plan import PlannedBucket
    from .domain import Domain
    from .gradient_code import GradientCode
    from .param_code import ParamCode

Waiting = Mapping[torch.nn.Parameter, ParamState]
Fresh = Collection[torch.Tensor]


@dataclass(eq=False)
class AllocatedBucket:
    """The allocations of one bucket.

    Attributes:
        entries: the records of its params; empty if they are frozen.
        sums: of their gradients, where the module was handed over.
        own: this rank's slice of the params apart from the bucket, at stage 3.
        code: the form in which params travel, to a pass at stage 3, else after an update; None: as they are.
        window: on the params, once ranks are connected.
        secondary: this rank's part of what is gathered, if ranks keep parts.
        sums_window: on the sums; None: no other rank reads them.
    """

    shard: Shard
    entries: tuple[ParamRecord, ...] = ()
    sums: GradientBucket | None = None
    own: ParamShard | None = None
    code: ShardCode | None = None
    window: Window | None = None
    secondary: SecondaryShard | None = None
    sums_window: Window | None = None


def allocate(
    domain: Domain,
    planned: PlannedBucket,
    waiting: Waiting,
    fresh: Fresh,
    landing: HostLanding | None,
    undo: ExitStack,
    stays: bool = False,
) -> AllocatedBucket:
    """Moves params into a bucket, makes masters and states, and fills them with loaded states.

    Args:
        waiting: states that were loaded, by param.
        fresh: params that have no values yet.
        stays: True if the states stay on the device, whatever is offloaded.
    """
    params = [param for _, param, _ in planned.members]
    exact: torch.Tensor | None = None
    if planned.is_cast:
        exact = exact_slice(params, planned.layout, domain.mesh.shard.rank, fresh)
        undo.callback(_cast_back, [param for param in params if param.dtype is torch.float32])
    bucket = _bucket(
        domain, params, planned.layout, fresh, planned.shards_params, undo, planned.dtype, exact is not None
    )
    is_offloaded = planned.shards_params and domain.offloads_params(bucket.device)
    store = domain.store_for(bucket.device, stays)
    shard = Shard(
        bucket, domain.mesh.shard.rank, planned.states, store, planned.formats, is_offloaded, exact, planned.keeps_exact
    )
    shard.stays, shard.takes_sources = stays, not domain.options.release_gradients
    shows, code = not planned.shards_params, None
    if planned.shards_params or not domain.shards_params:
        code = _param_code(domain, shard, shows)
    undo.callback(shard.home.release)
    entries = []
    for index, (name, param, group) in enumerate(planned.members):
        outer, initial, state = bucket.outers[index], domain.rule.initial_values(group), waiting.get(param)
        entry = ParamRecord(param, name, shard, index, outer, initial, domain.rule.of(group).name)
        entries.append(entry)
        if state is None:
            entry.write_initial()
        else:
            entry.write_state(state)
            entry.load_counters(state)
            entry.note_loaded(state)
    sums = None if domain.options.module is None else _sums(domain, planned, shard, landing, undo)
    if not planned.shards_params:
        return AllocatedBucket(shard, tuple(entries), sums, code=None if code is None else shard.keep_exact(code))
    return AllocatedBucket(shard, tuple(entries), sums, shard.make_param_shard(), code)


def allocate_frozen(
    domain: Domain,
    params: Sequence[torch.nn.Parameter],
    layout: BucketLayout,
    dtype: torch.dtype,
    fresh: Fresh,
    undo: ExitStack,
) -> AllocatedBucket:
    """Moves frozen params into a bucket of this dtype: they have no master, no state and no gradient."""
    exact: torch.Tensor | None = None
    if params[0].dtype is not dtype:
        exact = exact_slice(params, layout, domain.mesh.shard.rank, fresh)
        undo.callback(_cast_back, params)
    bucket = _bucket(domain, params, layout, fresh, True, undo, dtype, exact is not None)
    is_offloaded = domain.offloads_params(bucket.device)
    store = domain.store_for(bucket.device) if is_offloaded else make_store(None, domain.options.tuning, bucket.device)
    shard = Shard(bucket, domain.mesh.shard.rank, (), store, NOTHING, is_offloaded, exact, exact is not None)
    undo.callback(shard.home.release)
    code = None if params[0] in domain.inner else _param_code(domain, shard)  # codes, or their scales
    return AllocatedBucket(shard, own=shard.make_param_shard(), code=code)


def _bucket(
    domain: Domain,
    params: Sequence[torch.nn.Parameter],
    layout: BucketLayout,
    fresh: Fresh,
    is_resharded: bool,
    undo: ExitStack,
    dtype: torch.dtype | None = None,
    is_cast: bool = False,
) -> Bucket:
    beside = {param: domain.inner[param].beside for param in params if param in domain.inner}
    is_rounded = is_resharded and is_cast
    bucket = Bucket(params, layout, fresh, is_resharded, domain.locals.bind(params), dtype, beside, is_rounded)
    undo.callback(_give_back, bucket)
    return bucket


def _give_back(bucket: Bucket) -> None:
    """Gives params memory of their own. If there is none, a param stays in the bucket, with its values."""
    with suppress(MemoryError, RuntimeError):  # torch reports a lack of memory as a RuntimeError
        bucket.release()


def _cast_back(params: Sequence[torch.nn.Parameter]) -> None:
    """Makes params fp32 again, with the values that they were rounded to: a copy of all would cost too much memory."""
    with suppress(MemoryError, RuntimeError):
        for param in params:
            if param.dtype is not torch.float32:
                param.data = param.data.float()


def _sums(
    domain: Domain, planned: PlannedBucket, shard: Shard, landing: HostLanding | None, undo: ExitStack
) -> GradientBucket:
    """Makes the bucket in which gradients of the shard are summed."""
    options, mesh, dtype = domain.options, domain.mesh, planned.formats.gradient.dtype
    sink: DeviceSum | HostSum | PassingSum
    if options.release_gradients:
        sink = PassingSum(shard.numel, shard.device, mesh)
    elif landing is None:
        shard.gradient_sum = sink = DeviceSum(shard.numel, dtype, shard.device, mesh)
        shard.sum_table = shard.tables.gradients_in(sink.total)
    else:
        shard.gradient_sum = sink = HostSum(shard.numel, dtype, mesh, landing)
        undo.callback(landing.give_back, sink.total)
    asked = options.reduce_dtype
    reduced = shard.bucket.dtype if asked is None or isinstance(asked, str) else asked
    make_code = None
    if isinstance(asked, str) and mesh.first.size > 1:
        make_code = partial(_gradient_code, domain, reduced, TRAFFIC_FORMATS[asked], shard.device)
    return GradientBucket(planned.layout, reduced, shard.device, mesh, sink, make_code)


def _param_code(domain: Domain, shard: Shard, shows: bool = False) -> ParamCode | None:
    asked, ranks = domain.options.gather_dtype, domain.mesh.shard
    if asked is None or ranks.size == 1 or shard.bucket.dtype not in GRADIENT_DTYPES:
        return None
    from .param_code import ParamCode

    bucket = shard.bucket
    return ParamCode(bucket.layout, ranks.rank, bucket.dtype, TRAFFIC_FORMATS[asked], bucket.device, shows)


def _gradient_code(
    domain: Domain, dtype: torch.dtype, format: BlockFormat, device: torch.device, layout: BucketLayout
) -> GradientCode:
    # Loaded where it is asked for: a fresh process imports no more than it uses.
    from .gradient_code import GradientCode
    from .residual import Residual

    residual = Residual(layout, domain.mesh.first, device) if domain.options.feeds_back else None
    return GradientCode(layout, dtype, format, device, residual)
