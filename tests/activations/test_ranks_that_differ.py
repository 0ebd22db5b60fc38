"""Promise: no mixture of tensors is ever used. Ranks that come to differ get one typed error on all, no hang."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardopt
from shardopt import CommunicationError, DisagreementError
from tests.support.absence import SOON
from tests.support.ranks import Pool
from tests.support.training import raises


def forward(x: Tensor, *factors: Tensor) -> Tensor:
    """Saves each factor."""
    for each in factors:
        x = x * each
    return x.sum()


def constant(value: float) -> Tensor:
    return torch.full((300,), float(value))


def gradient_of(x: Tensor) -> float:
    assert x.grad is not None
    found, x.grad = float(x.grad[0]), None
    return found


def same_at_first() -> None:
    """Tensors that are the same in the first step, and of another value on each rank in the second."""
    rank = dist.get_rank()
    x = torch.ones(300, requires_grad=True)
    for check in (False, True):
        for step in range(4):
            own = constant(2 if step == 0 else 3 + rank)
            with shardopt.partition_activations(keep_below=1, check=check) as context:
                loss = forward(x, own, constant(5))
            if step == 1 and not check:
                with raises(DisagreementError, "zero_grad()", "check=True", "between rank 0 and rank 1"):
                    loss.backward()
                x.grad = None
                continue
            # From then on it stays whole, or was never taken for the same.
            slices = [each for each in (own, constant(5)) if step == 0 or each is not own]
            assert context.memory()["partitioned"] == {"device": 608 * len(slices)}, step
            loss.backward()
            assert gradient_of(x) == float(own[0]) * 5


def recursive(x: Tensor, factors: list[Tensor]) -> Tensor:
    with shardopt.partition_activations(keep_below=1):
        y = x * factors[0]
        return recursive(y, factors[1:]) if factors[1:] else y.sum()


def within_itself() -> None:
    """The inner ``with`` goes on counting where the outer one is: what differs in it is not taken for the outer's."""
    own = constant(3 + dist.get_rank())
    x = torch.ones(300, requires_grad=True)
    for _ in range(2):
        recursive(x, [constant(2), own, constant(5)]).backward()
        assert gradient_of(x) == 10 * float(own[0])


def other_calls() -> None:
    rank = dist.get_rank()
    x = torch.ones(300, requires_grad=True)

    def right() -> None:
        with shardopt.partition_activations(keep_below=1):
            loss = forward(x, constant(2), constant(3))
        loss.backward()
        assert gradient_of(x) == 6

    # One saves a tensor more.
    factors = [constant(2), *([constant(7)] if rank else []), constant(3)]
    with raises(DisagreementError, "same forward", "gathers tensor", "compares tensor"):
        with shardopt.partition_activations(keep_below=1):
            loss = forward(x, *factors)
        loss.backward()
    x.grad = None
    right()
    # They run two backwards in another order.
    for _ in range(2):
        losses = []
        with shardopt.partition_activations(keep_below=1):
            for value in (2, 3):
                losses.append(forward(x, constant(value), constant(value + 10)))
        with raises(DisagreementError, "gathers tensor 3", "gathers tensor 1"):
            losses[rank].backward()
        x.grad = None
    right()
    # They are told other things.
    for keywords in ({"check": bool(rank)}, {"keep_below": 1 + rank}):
        with raises(DisagreementError, "check= and keep_below="), shardopt.partition_activations(**keywords):
            forward(x, constant(2))
    right()


def never_comes() -> str:
    """Rank 1 runs no backward."""
    x = torch.ones(300, requires_grad=True)
    context = shardopt.partition_activations(keep_below=1, timeout=1000)
    with context:
        loss = forward(x, constant(2))
    dist.barrier()
    if dist.get_rank() == 1:
        return ""
    context._ranks._deadline = timedelta(seconds=SOON)
    try:
        loss.backward()
    except CommunicationError as error:
        return str(error)
    return "it came"


def test_what_differs_later_is_an_error_on_all_ranks(ranks: Pool) -> None:
    ranks.run(same_at_first, world=2)
    ranks.run(within_itself, world=2)


def test_other_calls_are_an_error_on_all_ranks(ranks: Pool) -> None:
    ranks.run(other_calls, world=2)


def test_a_rank_that_does_not_come(ranks: Pool) -> None:
    assert "while gathering activations in backward, on rank 0 of 2" in ranks.run(never_comes, world=2, doomed=[1])[0]


def meshes() -> None:
    with raises(ValueError, 'mesh["tp"]', "('dp', 'tp')"):
        shardopt.partition_activations(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    other: Any = dist.new_group([1 - dist.get_rank()], use_local_synchronization=False)
    with raises(TypeError, "new_group"):
        shardopt.partition_activations(dist.GroupMember.NON_GROUP_MEMBER if other is None else 7)  # type: ignore[arg-type]


def test_groups_that_say_too_little(ranks: Pool) -> None:
    ranks.run(meshes, world=2)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"offload": "disk"}, ValueError, "offload must be 'cpu', or None"),
        ({"keep_below": -1}, ValueError, "keep_below .elements. must be a whole number at least 0, found -1\\."),
        ({"check": "yes"}, TypeError, "check takes True or False"),
        ({"timeout": 0}, ValueError, "timeout .seconds. must be a number above 0"),
        ({"process_group": 7}, TypeError, "process_group takes a ProcessGroup.*found 7"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shardopt.partition_activations(**arguments)
