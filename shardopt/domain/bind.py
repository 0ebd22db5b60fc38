"""Binds params on all ranks or on none.

Frameworks move, cast, load and wrap a model after the optimizer was made, so binding waits for the first step or
forward. Params that appear later (``add_param_group``, unfreezing) are bound when they do, into buckets of their own: a
bound param never changes its place. The order of events:

1. plan and check: decides which params share a bucket, with integers only;
2. agree: everything that the layout depends on is the same on all ranks. States that were loaded as parts of other
   slices are exchanged;
3. allocate: makes all that lasts, on this rank alone. Agree: every rank could;
4. connect: ranks exchange the addresses of what each made. Agree: every rank did;
5. adopt: adds it to the domain. Nothing is allocated, nothing can fail.

An error before 5 is raised on all ranks, and all of them undo what they made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BindingError
from ..option import compared
from ..partition.layout import BucketLayout
from ..partition.memory import return_free_memory
from ..tensors.inner_tensors import is_wrapper
from ..tensors.unsharded_guard import is_sharded
from .agreement import UNBOUND, agreed, checksum
from .allocate import allocate, allocate_frozen
from .bindable import check_bindable, check_free_of_parts, check_gradient_format, warn_of_master
from .bucket_plan import plan_buckets
from .called import stage_numbers
from .connect import connect, open_windows
from .dtensors import is_dtensor
from .experts import own_units
from .frozen import kept_whole
from .model_units import UnitPlan, check_names, units_of
from .param import named_params
from .precision import check_castable, dtype_in_model
from .recut import recut
from .tiers import check_offload, make_landing

if TYPE_CHECKING:
    from ..offload.gradients import HostLanding
    from .allocate import AllocatedBucket, Fresh, Waiting
    from .bucket_plan import PlannedBucket
    from .domain import Domain, Links
    from .param import Candidate, Group, ParamRecord

UnitTable = Mapping[torch.nn.Parameter, tuple[int, UnitPlan]]


def bind(
    domain: Domain,
    groups: Sequence[Group],
    numbers: Sequence[dict[str, Any]],
    candidates: Sequence[Candidate],
    waiting: Waiting,
    *,
    frozen: Sequence[torch.nn.Parameter] = (),
    fresh: Fresh = (),
    closure: bool = False,
) -> list[ParamRecord]:
    """Collective: moves params into buckets. Returns the records of those that train, a bucket's together.

    Args:
        numbers: the groups' hyper-parameters as plain numbers.
        candidates: params that train.
        waiting: states that were loaded, by param. The caller drops those of the records afterwards.
        frozen: params that do not train, to be sharded; see :func:`.frozen.frozen_of`.
        fresh: params and buffers that were on the meta device and have no values yet.
        closure: True if ``step()`` was called with one; must be equal on all ranks.

    Raises:
        BindingError: no bucket can hold a param; on the ranks that have the param.
        DisagreementError: ranks differ in what they bind, or another one has a problem.
        StateError: a state was loaded as parts, and no rank has some of its elements.
        Exception: this rank's own problem, such as no memory; DisagreementError on the other ranks.
    """
    device, world = _device_of(domain, candidates, frozen), domain.mesh.world
    description = _description(domain, groups, numbers, candidates, closure, waiting)
    description["frozen params of the module"] = [[list(param.shape), str(param.dtype)] for param in frozen]
    beside = [param for param in frozen if param in domain.inner and not isinstance(param, torch.nn.Parameter)]
    alone = [each for each in beside if not is_wrapper(domain.owner_of(each))]  # no collective shares their values
    description["scales of frozen params"] = [checksum(each) for each in alone] if world.size > 1 else []
    with agreed(description, world):
        if candidates:
            _check(domain, groups, candidates)
        units = unit_table(domain)
        plan = plan_of(domain, candidates, units)
        description["values"] = _values(domain, candidates, fresh) if world.size > 1 else {}
    recut(plan, domain.mesh, waiting)
    with ExitStack() as undo:
        made: list[AllocatedBucket] = []
        landing = domain.landing
        with agreed("bound", world):
            if domain.sharded is not None:  # frozen params that train from now on need whole values first
                domain.sharded.remove_params([domain.locals.outer_of(param) for _, param, _ in candidates])
            if domain.links is None and domain.options.module is not None:
                landing = _landing(domain, device, undo)
            stay = _num_staying(domain, plan)
            made += [
                allocate(domain, planned, waiting, fresh, landing, undo, number < stay)
                for number, planned in enumerate(plan)
            ]
            made += [allocate_frozen(domain, *each, fresh, undo) for each in _frozen_layouts(domain, frozen, units)]
        links = domain.links
        with agreed("connected", world):
            if links is None:
                links = connect(domain, device, landing, undo)
            open_windows(links, made)
        undo.pop_all()
    assert links is not None
    _adopt(domain, links, made, units)
    return_free_memory(device)  # of params before they moved, and of temporaries
    return [entry for each in made for entry in each.entries]


def _device_of(domain: Domain, candidates: Sequence[Candidate], frozen: Sequence[torch.nn.Parameter]) -> torch.device:
    params = [*(param for _, param, _ in candidates), *frozen]
    if not params and domain.options.module is not None:  # ranks are connected for the params of experts
        params = list(domain.options.module.parameters())
    return params[0].device


def _landing(domain: Domain, device: torch.device, undo: ExitStack) -> HostLanding | None:
    landing = make_landing(domain.options.offload_options, device)
    if landing is not None:
        undo.callback(landing.close)
    return landing


def _num_staying(domain: Domain, plan: Sequence[PlannedBucket]) -> int:
    """Returns how many of the first buckets of backward keep their states on the device."""
    offload = domain.options.offload_options
    if offload is None or isinstance(offload.fraction, str) or offload.fraction == 1:
        return 0
    from .staying import bytes_of_states, num_staying

    return num_staying([bytes_of_states(planned) for planned in plan], offload.fraction)


def _check(domain: Domain, groups: Sequence[Group], candidates: Sequence[Candidate]) -> None:
    """Raises BindingError for problems that this rank can find alone. Changes nothing."""
    device, options = domain.device if domain.shards else candidates[0][1].device, domain.options
    copies, in_backward = domain.mesh.replicate.size, options.release_gradients
    check_offload(options.offload_options, device, copies, in_backward)
    if isinstance(options.reduce_dtype, str) and domain.mesh.is_hybrid:
        raise BindingError(
            f"omit reduce_dtype={options.reduce_dtype!r}, or give a process_group of one dimension: over a 2D mesh "
            "(replicate, shard) sums of slices would still travel between the copies in fp32, where most of the time "
            "is lost."
        )
    if options.tuning.by_host:
        _check_by_host(domain)
    with torch._C.DisableTorchFunctionSubclass():  # reads shapes and strides of resharded params, no values
        check_bindable(candidates, groups, device)
        if options.module is None:
            check_free_of_parts(candidates)
    check_castable(domain, candidates)
    check_gradient_format(options, candidates)
    if not domain.entries and options.precision is None:
        warn_of_master(options, groups)


def _check_by_host(domain: Domain) -> None:
    if domain.mesh.is_hybrid:
        raise BindingError(
            "omit Tuning(by_host=True), or give a process_group of one dimension: of a 2D mesh (replicate, shard) each "
            "dimension is a group of its own, which may lie across hosts or within one."
        )
    if domain.options.release_gradients and domain.mesh.shard.size == 1 < domain.mesh.replicate.size:
        raise BindingError(
            "omit Tuning(by_host=True) or give stage=1: with release_gradients=True at stage 0 every rank sums whole "
            "buckets, which no rank of its host could do for it."
        )


def _adopt(domain: Domain, links: Links, made: Sequence[AllocatedBucket], units: UnitTable) -> None:
    """Adds to the domain what all ranks have made."""
    trained, stages = [each for each in made if each.entries], stage_numbers(domain.options.module)
    for each in trained:
        if each.own is None:
            assert each.window is not None
            each.shard.window = each.window
        if each.sums is not None:
            assert links.reducer is not None
            each.shard.number = links.reducer.add(each.sums, each.sums_window, stages.get(each.entries[0].param, 0))
    domain.adopt(links, [each.shard for each in trained], [entry for each in trained for entry in each.entries])
    for each in made:
        if each.own is not None:
            assert links.sharded is not None and each.window is not None
            unit = units[domain.owner_of(each.shard.bucket.params[0])]
            of_bucket = each.shard, each.own, each.window, each.secondary
            links.sharded.shard_params(*of_bucket, unit, not each.entries, domain.owner_of)


# -- the plan ----------------------------------------------------------------------------------------------------------


def unit_table(domain: Domain) -> UnitTable:
    """Returns each local param of the module with its unit and that one's number; empty below stage 3."""
    module = domain.options.module
    if module is None or not domain.shards_params:
        return {}
    tuning = domain.options.tuning
    check_names(units_of(module, tuning.units), tuning)
    units = own_units(domain, module, tuning.units)
    return {domain.locals.of(param): (number, unit) for number, unit in units for param in unit.params}


def plan_of(domain: Domain, candidates: Sequence[Candidate], units: UnitTable) -> list[PlannedBucket]:
    """Returns layouts for these params, in backward order."""

    def bucket_bytes(device: torch.device) -> int:
        return domain.options.tuning.bucket_bytes_of(device, domain.options.module is not None)

    numbers = {param: number for param, (number, _) in units.items()} if units else None
    kept = kept_whole(domain)
    stages, outer_of = stage_numbers(domain.options.module), domain.locals.outer_of
    slices = {param for _, param, _ in candidates if is_dtensor(outer_of(param))}
    num_shards = domain.mesh.shard.size
    return plan_buckets(
        candidates,
        domain.rule,
        domain.options,
        num_shards,
        bucket_bytes,
        kept,
        numbers,
        stages,
        slices,
        dtype_in_model(domain),
    )


def _is_sharded(domain: Domain, param: torch.nn.Parameter) -> bool:
    return is_sharded(domain.locals.outer_of(param))


def _frozen_layouts(
    domain: Domain, params: Sequence[torch.nn.Parameter], units: UnitTable
) -> list[tuple[list[torch.nn.Parameter], BucketLayout, torch.dtype]]:
    dtype_of = dtype_in_model(domain)

    def seen(param: torch.nn.Parameter) -> torch.dtype:
        return param.dtype if param in domain.inner else dtype_of(param)

    def key(param: torch.nn.Parameter) -> tuple[int, bool, str]:
        return units[domain.owner_of(param)][0], param in domain.inner, f"{seen(param)} of {param.dtype}"

    kinds = [list(kind) for _, kind in groupby(sorted(params, key=key), key=key)]
    ranks = domain.mesh.shard.size
    return [(kind, BucketLayout(tuple(param.numel() for param in kind), ranks), seen(kind[0])) for kind in kinds]


# -- the comparison ----------------------------------------------------------------------------------------------------


def _values(domain: Domain, candidates: Sequence[Candidate], fresh: Fresh) -> dict[str, int]:
    """Returns a checksum of each param, by which ranks notice that they start from different weights."""
    return {
        name: 0 if param in fresh or _is_sharded(domain, param) else checksum(param) for name, param, _ in candidates
    }


def _description(
    domain: Domain,
    groups: Sequence[Group],
    numbers: Sequence[dict[str, Any]],
    candidates: Sequence[Candidate],
    closure: bool,
    waiting: Waiting,
) -> dict[str, Any]:
    return {
        UNBOUND: [name for name, _, _ in candidates],
        "options": {
            "rule": domain.rule.name,
            **compared(domain.options),
            "shards": domain.mesh.shard.size,
            "replicas": domain.mesh.replicate.size,
        },
        "call": {"closure": closure},
        "params of groups": [len(group["params"]) for group in groups],
        "params": [
            {
                "name": name,
                "shape": list(param.shape),
                "dtype": str(param.dtype),
                "strides": list(param.stride()),
                "device": param.device.type,
                "requires_grad": param.requires_grad,
                "bound": param in domain.entries,
                "loaded step": waiting[param].step if param in waiting else None,
            }
            for name, param, _ in named_params(groups)
        ],
        "groups": list(numbers),
    }
