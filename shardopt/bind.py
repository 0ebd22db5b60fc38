"""Binds params on all ranks or on none: compares all that the layout depends on, allocates, adopts."""

from collections.abc import Sequence
from typing import Any

import torch

from .agreement import View, agree
from .bindable import check_bindable, check_gradient_format, warn_of_master
from .domain import Domain
from .entry import Candidate, Group, named_params
from .errors import BindingError
from .option import compared
from .partition.released import is_sharded
from .partition.room import return_free_pages
from .tiers import check_offload


def bind(
    domain: Domain,
    groups: Sequence[Group],
    numbers: Sequence[dict[str, Any]],
    candidates: Sequence[Candidate],
    closure: bool = False,
) -> None:
    """Collective: takes ``candidates`` into buckets.

    Args:
        numbers: the groups' hyper-parameters as plain numbers.
        closure: whether ``step()`` was called with one; must be equal on all ranks.

    Raises:
        BindingError: a param that no bucket can hold; on the ranks that have it.
        DisagreementError: ranks differ in what they bind, or another one has a problem.
    """
    problem: Exception | None = None
    plan, sums = [], []
    try:
        device = domain.device if domain.shards else candidates[0][1].device
        check_offload(domain.options.rests, device, domain.mesh.replicate.size)
        if domain.options.release_gradients and domain.options.rests is not None and device.type != "cpu":
            raise BindingError(
                f"release_gradients=True was given with offload={domain.options.offload!r} and params on {device}: "
                "states would come and go for one bucket after the other in mid-backward, which no test has seen to be "
                "right. Leave one of the two away."
            )
        with torch._C.DisableTorchFunctionSubclass():  # released params are looked at, and not read
            check_bindable(candidates, groups, device)
        check_gradient_format(domain.options, candidates)
        if not domain.entries:
            warn_of_master(domain.options, groups)
        plan = domain.plan(candidates)
        if domain.mesh.world.size > 1:
            sums = [0 if param in domain.fresh or is_sharded(param) else checksum(param) for _, param, _ in candidates]
    except Exception as error:
        problem = error
    description = _description(domain, groups, numbers, candidates, closure)
    description["values"] = {name: value for (name, _, _), value in zip(candidates, sums, strict=False)}
    world, device = domain.mesh.world, candidates[0][1].device
    agree(View(description, lambda: description, problem), world, device)
    if domain.sharded is not None:  # they were frozen: whole values first
        domain.sharded.let_go([param for _, param, _ in candidates])
    # Memory can run out on one rank alone: what was made is given back, and all ranks hear of it.
    shards = []
    try:
        for planned in plan:
            shards.append(domain.make_shard(planned))
    except Exception as error:
        problem = error
    try:
        agree(View("bound", dict, problem), world, device)
        domain.adopt(plan, shards)
        return_free_pages()  # what came and went while params moved and masters were made
    except BaseException:
        for shard in reversed(shards):
            shard.home.release()
            shard.bucket.release()
        raise


def _description(
    domain: Domain,
    groups: Sequence[Group],
    numbers: Sequence[dict[str, Any]],
    candidates: Sequence[Candidate],
    closure: bool,
) -> dict[str, Any]:
    return {
        "params not yet bound": [name for name, _, _ in candidates],
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
                "loaded step": domain.loaded[param].step if param in domain.loaded else None,
            }
            for name, param, _ in named_params(groups)
        ],
        "groups": list(numbers),
    }


def checksum(param: torch.Tensor) -> int:
    """Sum of the bit patterns: ranks that start from different weights would mix them."""
    bits = param.detach().contiguous().view(torch.int16 if param.element_size() == 2 else torch.int32)
    return int(bits.sum(dtype=torch.int64))
