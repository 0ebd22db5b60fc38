"""One step, in six phases; with ``survey.py`` the only place that joins a rule, a shard and the kernels.

1. survey: every param still in place, weights that were loaded followed, gradients usable, kernels compiled;
2. agree: one small message: same call on all ranks, overflow, norm;
3. decide: skip on all ranks, or the factors that every gradient is multiplied by;
4. update: one launch for each shard;
5. gather: the updated shards travel to the other ranks;
6. commit: step counts, and versions, so that autograd sees that the params were written.

Nothing is changed before phase 4: whatever is wrong on any rank is raised on all of them before.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .agreement import Agreed, View, agree
from .binding import Binding, Candidate, Group, named_params
from .errors import CommunicationError, ShardoptError
from .kernels.launch import backend_of
from .kernels.reductions import sum_of_squares
from .shard import Shard
from .survey import Launch, Scaling, Survey, check_numbers, plain_numbers, survey

# Keeps a norm of zero from dividing, as in torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6
_HALF_WAY = "Some shards are updated, others are not: do not go on training from here; restart from a checkpoint."


@dataclass(frozen=True)
class Call:
    """One call of ``step()``.

    Attributes:
        groups: the param groups; ``defaults`` names their hyper-parameters.
        closure: whether one was given; must be equal on all ranks.
        problem: an error that this rank met before, in its closure, to be raised on all ranks.
    """

    groups: Sequence[Group]
    defaults: Mapping[str, Any]
    scaling: Scaling
    closure: bool
    problem: Exception | None


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    updated: bool
    grad_norm: float | None  # global 2-norm before clipping, where max_grad_norm asked for it


def run_step(binding: Binding, call: Call) -> Outcome:
    """Takes one step with the gradients that the params hold."""
    if binding.broken is not None:
        raise ShardoptError(
            f"an earlier step failed half-way ({binding.broken}): params and states of the ranks may belong to "
            "different steps. Construct model and optimizer anew and load a checkpoint."
        )
    numbers: list[dict[str, Any]] = []
    candidates: list[Candidate] = []
    problem = call.problem
    if problem is None:
        try:
            numbers = [plain_numbers(group) for group in call.groups]
            check_numbers(numbers, call.defaults)
            candidates = binding.unbound(call.groups)
        except Exception as error:
            problem = error
    if candidates:
        _bind(binding, call, numbers, candidates)
    # 1. survey
    seen = Survey()
    if problem is None:
        try:
            seen = survey(binding, call.groups, numbers, call.scaling)
        except Exception as error:
            problem = error
    # 2. agree
    view = _view(binding, call, numbers, seen, problem)
    agreed = agree(view, binding.ranks, binding.device, sharded=binding.num_shards > 1)
    if agreed.written and binding.ranks.size > 1:
        _compare_written(binding, seen)
    binding.rounds += 1
    # 3. decide
    norm = _norm(binding, agreed)
    if agreed.overflow or _is_skipped(binding, agreed, seen.launches, call.scaling):
        return Outcome(updated=False, grad_norm=norm)
    clip = 1.0
    if norm is not None and binding.options.max_grad_norm is not None:
        clip = min(1.0, binding.options.max_grad_norm / (norm + _CLIP_EPS))
    # 4. update, 5. gather
    try:
        _update(binding, seen, 1.0 / call.scaling.scale, clip)
    except BaseException as error:
        binding.broken = f"{type(error).__name__}: {error}"
        raise
    # 6. commit
    for each in seen.ready:
        each.entry.step += 1
        each.entry.carried = seen.scalars.carried[each.entry]
        each.entry.has_state = True
    torch.autograd.graph.increment_version([each.entry.param for each in seen.ready])
    for entry in (*seen.written, *(each.entry for each in seen.ready)):
        entry.version = entry.param._version
    return Outcome(updated=True, grad_norm=norm)


# -- binding, in agreement ---------------------------------------------------------------------------------------------


def _bind(binding: Binding, call: Call, numbers: list[dict[str, Any]], candidates: list[Candidate]) -> None:
    """Compares all that the layout depends on, then binds; on all ranks or on none."""
    options = binding.options
    problem: Exception | None = None
    plan, sums = [], []
    try:
        binding.check_bindable(candidates, call.groups)
        plan = binding.plan(candidates)
        sums = [_checksum(param) for _, param, _ in candidates] if binding.ranks.size > 1 else []
    except Exception as error:
        problem = error
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
        "call": {"closure": call.closure},
        "params of groups": [len(group["params"]) for group in call.groups],
        "params": [
            {
                "name": name,
                "shape": list(param.shape),
                "dtype": str(param.dtype),
                "strides": list(param.stride()),
                "device": param.device.type,
                "requires_grad": param.requires_grad,
                "bound": param in binding.entries,
                "loaded step": binding.loaded[param].step if param in binding.loaded else None,
            }
            for name, param, _ in named_params(call.groups)
        ],
        "groups": numbers,
        "values": {name: value for (name, _, _), value in zip(candidates, sums, strict=False)},
    }
    view = View(description, lambda: description, problem)
    device = candidates[0][1].device
    agree(view, binding.ranks, device, sharded=True)
    # Memory can run out on one rank alone: what was made is given back, and all ranks hear of it.
    shards = []
    try:
        for planned in plan:
            shards.append(binding.make_shard(planned))
    except Exception as error:
        problem = error
    try:
        agree(View("bound", dict, problem), binding.ranks, device, sharded=True)
        binding.adopt(plan, shards)
    except BaseException:
        for shard in shards:
            shard.bucket.release()
        raise


def _checksum(param: torch.Tensor) -> int:
    """Sum of the bit patterns: ranks that start from different weights would mix them."""
    bits = param.detach().contiguous().view(torch.int16 if param.element_size() == 2 else torch.int32)
    return int(bits.sum(dtype=torch.int64))


# -- 2. agree ----------------------------------------------------------------------------------------------------------


def _view(binding: Binding, call: Call, numbers: list[dict[str, Any]], seen: Survey, problem: Exception | None) -> View:
    present = {each.entry for each in seen.ready}
    entries = list(binding.entries.values())

    def describe() -> dict[str, Any]:
        return {
            "params not yet bound": [],
            "calls of step()": binding.rounds,
            "call": {"closure": call.closure},
            "groups": numbers,
            "gradients": {entry.name: "present" if entry in present else "absent" for entry in entries},
            "steps taken": {entry.name: entry.step for entry in entries},
            "carried scalars": {entry.name: entry.carried for entry in entries},
            "loss scale (the GradScaler's update() must see the same overflow on all ranks)": call.scaling.scale,
        }

    facts = [(entry.step, entry in present, *entry.carried.values()) for entry in entries]
    key = [binding.rounds, call.closure, numbers, facts, call.scaling.scale]
    looked = seen.looked
    overflow, written = call.scaling.overflow, len(seen.written)
    return View(key, describe, problem, overflow, looked.nonfinite, looked.witness, written, looked.limbs)


def _compare_written(binding: Binding, seen: Survey) -> None:
    """Weights that were loaded, clamped or averaged on any rank must be the same on all: each reads its own copy."""
    entries = list(binding.entries.values())
    written = set(seen.written)
    mine = [index for index, entry in enumerate(entries) if entry in written]
    everyones = binding.ranks.exchange_json(mine, binding.device, "comparing weights that were written")
    union = sorted({index for theirs in everyones for index in theirs})
    sums = {f"weights (sum of bits) of {entries[index].name}": _checksum(entries[index].param) for index in union}
    agree(View(sums, lambda: sums), binding.ranks, binding.device, sharded=True)


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


def _update(binding: Binding, seen: Survey, unscale: float, clip: float) -> None:
    """Launches every update of this rank and gathers the buckets that any rank updated."""
    if binding.transport is None:  # nothing is bound: every param is frozen
        return
    updated = {each.entry.shard for each in seen.ready}
    gather = binding.transport.gather(binding.device, "gathering updated params")
    problem: Exception | None = None
    # Backward order reversed: the first layers' params, which the next forward needs first, arrive first.
    for shard in reversed(binding.shards):
        try:
            shard.ensure_states(seen.states[shard])
            if problem is None:
                _launch_all(shard, seen.launches, unscale, clip)
        except Exception as error:  # the other ranks wait for this one's shards: they are told when these have met
            problem = error
        if shard in updated:
            gather.start(shard.window)
    try:
        gather.finish(failed=problem is not None)
    except CommunicationError as error:
        if problem is None:
            raise CommunicationError(f"{error} {_HALF_WAY}") from error
    if problem is not None:
        problem.add_note(_HALF_WAY)
        raise problem


def _launch_all(shard: Shard, launches: Sequence[Launch], unscale: float, clip: float) -> None:
    backend = backend_of(shard.param.device)
    for launch in launches:
        if launch.shard is shard:
            streams = shard.streams(launch.spec.variant.states)
            backend.step(launch.spec, streams, launch.gradients, launch.scalars, unscale, clip)
