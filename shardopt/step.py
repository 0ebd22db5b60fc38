"""One step, in six phases; the only file that joins a rule, a shard and the kernels.

1. survey: every param still in place, weights that were loaded followed, gradients usable, kernels compiled;
2. agree: one small message: same call on all ranks, overflow, norm;
3. decide: skip on all ranks, or the factors that every gradient is multiplied by;
4. update: one launch for each shard;
5. gather: each bucket starts to travel as soon as its shard is updated, while the next one is updated;
6. commit: step counts, and versions, so that autograd sees that the params were written.

Nothing is changed before phase 4: whatever is wrong on any rank is raised on all of them before.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .agreement import Agreed, View, agree
from .binding import Binding, Entry, Group, named_params
from .errors import CommunicationError, ShardoptError
from .kernels.formats import format_of
from .kernels.launch import backend_of
from .kernels.reductions import LIMBS, sum_of_squares
from .kernels.spec import StepSpec
from .kernels.tables import Gradients
from .rules import Variant
from .shard import Shard

# A factor that keeps a norm of zero from dividing, as in torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6


class Scaling(NamedTuple):
    """What a GradScaler's fused protocol hands over."""

    scale: float = 1.0
    overflow: bool = False


@dataclass(frozen=True)
class Ready:
    """A param that will be updated."""

    entry: Entry
    group: int
    grad: torch.Tensor  # dense, in the param's storage order


@dataclass(frozen=True)
class Launch:
    """One kernel launch over one shard: the params of one variant and one gradient dtype."""

    shard: Shard
    spec: StepSpec
    gradients: Gradients
    ready: Mapping[int, Ready]  # row -> param


class Scalars(NamedTuple):
    """The scalars of every param that will be updated."""

    now: dict[Entry, tuple[float, ...]]  # in the order of its variant's names
    carried: dict[Entry, dict[str, float]]  # to its next step


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    updated: bool
    grad_norm: float | None  # global 2-norm before clipping, where max_grad_norm asked for it


def run_step(
    binding: Binding,
    groups: Sequence[dict[str, Any]],
    scaling: Scaling,
    call: Mapping[str, Any],
    problem: Exception | None,
) -> Outcome:
    """Takes one step with the gradients that the params hold.

    Args:
        call: JSON-able facts about this call that must be equal on all ranks.
        problem: an error that this rank met before (in its closure), to be raised on all ranks.
    """
    numbers = [plain_numbers(group) for group in groups]
    candidates = binding.unbound(groups)
    if candidates:
        _bind(binding, groups, numbers, candidates, call, problem)
        problem = None
    # 1. survey
    launches, ready, scalars = [], [], Scalars({}, {})
    looked = Looked()
    if problem is None:
        try:
            ready = _survey(binding, groups)
            launches = _plan_launches(binding, numbers, ready)
            scalars = _scalars(binding, numbers, ready)
            looked = _look_at_gradients(binding, launches, scaling)
        except Exception as error:
            problem = error
    view = _view(binding, numbers, ready, scaling, call, looked, problem)
    # 2. agree
    agreed = agree(view, binding.ranks, binding.device, sharded=binding.num_shards > 1)
    # 3. decide
    norm = _norm(binding, agreed)
    if agreed.overflow or _is_skipped(binding, agreed, launches, scaling):
        return Outcome(updated=False, grad_norm=norm)
    clip = 1.0
    if norm is not None and binding.options.max_grad_norm is not None:
        clip = min(1.0, binding.options.max_grad_norm / (norm + _CLIP_EPS))
    # 4. update, 5. gather
    _update(binding, launches, {each.entry.shard for each in ready}, scalars, 1.0 / scaling.scale, clip)
    # 6. commit
    for each in ready:
        each.entry.step += 1
        each.entry.carried = scalars.carried[each.entry]
        each.entry.has_state = True
    torch.autograd.graph.increment_version([each.entry.param for each in ready])
    for each in ready:
        each.entry.version = each.entry.param._version
    return Outcome(updated=True, grad_norm=norm)


# -- binding, in agreement ---------------------------------------------------------------------------------------------


def _bind(
    binding: Binding,
    groups: Sequence[dict[str, Any]],
    numbers: list[dict[str, Any]],
    candidates: list[tuple[str, torch.nn.Parameter, Group]],
    call: Mapping[str, Any],
    problem: Exception | None,
) -> None:
    """Compares all that the layout depends on, then binds."""
    options = binding.options
    description = {
        "params not yet bound": [name for name, _, _ in candidates],
        "options": {
            "rule": binding.rule.name,
            "stage": options.stage,
            "max_grad_norm": options.max_grad_norm,
            "bucket_bytes": options.tuning.bucket_bytes,
            "nonfinite": options.tuning.nonfinite,
            "neighbours": options.tuning.neighbours,
        },
        "call": dict(call),
        "params of groups": [len(group["params"]) for group in groups],
        "params": [
            {
                "name": name,
                "shape": list(param.shape),
                "dtype": str(param.dtype),
                "strides": list(param.stride()),
                "device": param.device.type,
                "requires_grad": param.requires_grad,
                "bound": param in binding.entries,
            }
            for name, param, _ in named_params(groups)
        ],
        "groups": numbers,
    }
    if problem is None:
        try:
            binding.check_bindable(candidates)
        except Exception as error:
            problem = error
    agree(View(description, lambda: description, problem), binding.ranks, candidates[0][1].device, sharded=True)
    binding.bind(candidates)


# -- 1. survey ---------------------------------------------------------------------------------------------------------


def _survey(binding: Binding, groups: Sequence[dict[str, Any]]) -> list[Ready]:
    binding.follow_written_params()
    ready = []
    for number, group in enumerate(groups):
        for param in group["params"]:
            entry = binding.entries.get(param)
            if entry is None:
                continue  # frozen
            entry.check()
            if param.grad is not None:
                ready.append(Ready(entry, number, _usable(entry, param.grad)))
    return ready


def _usable(entry: Entry, grad: torch.Tensor) -> torch.Tensor:
    if grad.layout is not torch.strided:
        raise ShardoptError(
            f"the gradient of {entry.name} is sparse ({grad.layout}): the fused update reads dense gradients and would "
            "read its indices as numbers. Build the embedding with sparse=False, or give this param to "
            "torch.optim.SparseAdam."
        )
    format_of(grad.dtype, f"the gradient of {entry.name}")
    if grad.shape != entry.param.shape or grad.device != entry.param.device:
        raise ShardoptError(
            f"the gradient of {entry.name} has shape {tuple(grad.shape)} on {grad.device}, the param "
            f"{tuple(entry.param.shape)} on {entry.param.device}: it was assigned by hand. Assign one that fits."
        )
    return entry.shard.ordered(entry.index, grad.detach())


def _plan_launches(binding: Binding, numbers: list[dict[str, Any]], ready: Sequence[Ready]) -> list[Launch]:
    by_place = {(id(each.entry.shard), each.entry.index): each for each in ready}
    variants = [binding.rule.variant(group) for group in numbers]
    launches = []
    for shard in binding.shards:
        rows: dict[tuple[Variant, torch.dtype], dict[int, Ready]] = defaultdict(dict)
        for row, piece in enumerate(shard.pieces):
            each = by_place.get((id(shard), piece.param))
            if each is not None:
                rows[variants[each.group], each.grad.dtype][row] = each
        for (variant, dtype), members in rows.items():
            spec = StepSpec(variant, shard.format, format_of(dtype, "a gradient"))
            shard.ensure_states(variant.states)
            backend_of(shard.param.device).prepare(spec)
            gradients = shard.gradients({row: each.grad for row, each in members.items()})
            launches.append(Launch(shard, spec, gradients, members))
    return launches


def _scalars(binding: Binding, numbers: list[dict[str, Any]], ready: Sequence[Ready]) -> Scalars:
    """Params of one group, step and carried values share one evaluation."""
    rule = binding.rule
    known: dict[tuple[Any, ...], tuple[tuple[float, ...], dict[str, float]]] = {}
    scalars = Scalars({}, {})
    for each in ready:
        entry = each.entry
        key = (each.group, entry.step, *entry.carried.values())
        if key not in known:
            group = numbers[each.group]
            known[key] = rule.evaluate(rule.variant(group), group, entry.step + 1, entry.carried)
        scalars.now[entry], scalars.carried[entry] = known[key]
    return scalars


class Looked(NamedTuple):
    """What the gradients of this rank's shards were found to hold, where the decision needs it."""

    nonfinite: int = 0
    limbs: tuple[int, ...] = (0,) * LIMBS  # sum of squares


def _look_at_gradients(binding: Binding, launches: Sequence[Launch], scaling: Scaling) -> Looked:
    options = binding.options
    if options.max_grad_norm is None and (options.tuning.nonfinite == "propagate" or scaling.overflow):
        return Looked()
    nonfinite, limbs = 0, [0] * LIMBS
    for launch in launches:
        backend = backend_of(launch.shard.param.device)
        if options.max_grad_norm is None:
            nonfinite += backend.count_nonfinite(launch.spec.grad, launch.gradients)
        else:
            sums = backend.block_sums(launch.spec.grad, launch.gradients, 1.0 / scaling.scale)
            total = backend.total(sums)
            nonfinite += total.nonfinite
            limbs = [mine + other for mine, other in zip(limbs, total.limbs, strict=True)]
    return Looked(nonfinite, tuple(limbs))


# -- 2. agree ----------------------------------------------------------------------------------------------------------


def _view(
    binding: Binding,
    numbers: list[dict[str, Any]],
    ready: Sequence[Ready],
    scaling: Scaling,
    call: Mapping[str, Any],
    looked: Looked,
    problem: Exception | None,
) -> View:
    present = {each.entry for each in ready}
    entries = list(binding.entries.values())

    def describe() -> dict[str, Any]:
        return {
            "params not yet bound": [],
            "call": dict(call),
            "groups": numbers,
            "gradients": {entry.name: "present" if entry in present else "absent" for entry in entries},
            "steps taken": {entry.name: entry.step for entry in entries},
            "loss scale": scaling.scale,
        }

    steps = [(entry.step, entry in present) for entry in entries]
    key = [dict(call), numbers, steps, scaling.scale]
    return View(key, describe, problem, scaling.overflow, looked.nonfinite, looked.limbs)


# -- 3. decide ---------------------------------------------------------------------------------------------------------


def _norm(binding: Binding, agreed: Agreed) -> float | None:
    if binding.options.max_grad_norm is None:
        return None
    return math.inf if agreed.nonfinite else math.sqrt(sum_of_squares(agreed.limbs))


def _is_skipped(binding: Binding, agreed: Agreed, launches: Sequence[Launch], scaling: Scaling) -> bool:
    policy = binding.options.tuning.nonfinite
    if not agreed.nonfinite or policy == "propagate":
        return False
    where = _where_nonfinite(launches, 1.0 / scaling.scale)
    message = (
        f"{agreed.nonfinite} elements of the gradients are Inf or NaN{where}: the update would have spread them into "
        "params and states"
    )
    if policy == "raise":
        raise ShardoptError(
            f"{message}, so no rank took the step and nothing changed. Look for the loss that overflowed; "
            'Tuning(nonfinite="skip") skips such steps.'
        )
    warnings.warn(f"{message}, so all ranks skipped this step and nothing changed.", stacklevel=4)
    return True


def _where_nonfinite(launches: Sequence[Launch], unscale: float) -> str:
    for launch in launches:
        for each in launch.ready.values():
            if not bool(torch.isfinite(each.grad * unscale).all()):
                return f" (on this rank first in {each.entry.name})"
    return ""


# -- 4. update, 5. gather ----------------------------------------------------------------------------------------------


def _update(
    binding: Binding,
    launches: Sequence[Launch],
    updated: set[Shard],
    scalars: Scalars,
    unscale: float,
    clip: float,
) -> None:
    """Launches every update of this rank and gathers the buckets that any rank ``updated``."""
    launches_of: dict[int, list[Launch]] = defaultdict(list)
    for launch in launches:
        launches_of[id(launch.shard)].append(launch)
    if binding.transport is None:  # nothing is bound: every param is frozen
        return
    gather = binding.transport.gather(binding.device, "gathering updated params")
    try:
        # Backward order reversed: the first layers' params, which the next forward needs first, arrive first.
        for shard in reversed(binding.shards):
            for launch in launches_of[id(shard)]:
                _launch(launch, scalars, unscale, clip)
            if shard in updated:
                gather.start(shard.window)
        gather.finish()
    except CommunicationError as error:
        raise CommunicationError(
            f"{error} This rank's shard is updated, other ranks' params may be old ones: do not go on training from "
            "here; restart from a checkpoint."
        ) from error


def _launch(launch: Launch, scalars: Scalars, unscale: float, clip: float) -> None:
    spec, shard = launch.spec, launch.shard
    table = np.zeros((shard.num_rows, len(spec.variant.scalars)), dtype=np.float32)
    for row, each in launch.ready.items():
        table[row] = scalars.now[each.entry]
    on_device = torch.from_numpy(table).to(shard.param.device)
    streams = shard.streams(spec.variant.states)
    backend_of(shard.param.device).step(spec, streams, launch.gradients, on_device, unscale, clip)


def plain_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's hyper-parameters with tensors read as numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.item()
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return value if isinstance(value, bool | int | float | str | None) else repr(value)

    return {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
