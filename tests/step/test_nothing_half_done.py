"""What fails does so as a whole, and nothing is lost in silence: each of these once went wrong without an error."""

import copy
import warnings
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from shardopt import (
    BindingError,
    CommunicationError,
    DisagreementError,
    ShardedAdam,
    ShardedAdamW,
    ShardedSGD,
    ShardoptError,
    StateError,
    Tuning,
)
from shardopt.kernels import native_backend
from shardopt.tensors.part import Part
from tests.support.beside_a_device import beside_a_device, for_gpus
from tests.support.ranks import Pool


def make_params(count: int = 3, numel: int = 700, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.linspace(-1, 1 + index, numel).to(dtype)) for index in range(count)]


def fill(params: list[Parameter], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = torch.sin(torch.arange(param.numel()) * (index + 1.0) + step).to(param.dtype).reshape(param.shape)


def bits(tensors: Any) -> list[bytes]:
    return [each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors]


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD"])
def test_infinite_weights_stay_what_they_are_in_torch(name: str) -> None:
    ends = []
    for module, prefix in ((torch.optim, ""), (shardopt, "Sharded")):
        param = Parameter(torch.tensor([-torch.inf, 1.0]))
        param.grad = torch.tensor([0.0, 1.0])
        getattr(module, prefix + name)([param], lr=0.1, weight_decay=0.0).step()
        ends.append(param.detach())
    torch.testing.assert_close(ends[1], ends[0], equal_nan=True)


def test_numpy_numbers_are_numbers() -> None:
    ends = []
    for kind in (torch.optim.SGD, ShardedSGD):
        param = Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        kind([param], lr=np.float32(0.5), maximize=np.bool_(False)).step()
        ends.append(param.detach())
    assert torch.equal(*ends)


def test_notes_in_a_group_are_the_users_own() -> None:
    params = make_params(1)
    optimizer = ShardedSGD([{"params": params, "mask": torch.ones(3), "name": "decay", "hook": len}], lr=0.5)
    fill(params, 0)
    expected = params[0].detach() - 0.5 * params[0].grad
    optimizer.step()
    assert torch.equal(params[0].detach(), expected)
    optimizer.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(TypeError, match=r"lr.*one element"):
        optimizer.step()


@pytest.mark.parametrize(("name", "key"), [("Adam", "step"), ("NAdam", "mu_product"), ("ASGD", "eta")])
def test_a_state_without_its_counters_is_refused(name: str, key: str) -> None:
    params = make_params(1)
    old = getattr(torch.optim, name)(params)
    fill(params, 0)
    old.step()
    saved = old.state_dict()
    del saved["state"][0][key]
    with pytest.raises(StateError, match=key):
        getattr(shardopt, f"Sharded{name}")(params).load_state_dict(saved)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
def test_masters_survive_either_order_of_loading(model_first: bool, bound: bool) -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = ShardedAdamW(params, lr=1e-2)
    for step in range(4):
        fill(params, step)
        optimizer.step()
    weights = [param.detach().clone() for param in params]
    saved = copy.deepcopy(optimizer.state_dict())
    fill(params, 9)
    optimizer.step()

    others = make_params(dtype=torch.bfloat16)
    resumed = ShardedAdamW(others, lr=1e-2)
    if bound:
        fill(others, 3)
        resumed.step()

    def load_model() -> None:
        with torch.no_grad():
            for param, weight in zip(others, weights, strict=True):
                param.copy_(weight)

    for load in (load_model, lambda: resumed.load_state_dict(saved))[:: 1 if model_first else -1]:
        load()
    fill(others, 9)
    resumed.step()
    masters = [[opt.state[param]["master"] for param in ps] for opt, ps in ((optimizer, params), (resumed, others))]
    assert bits(others) == bits(params) and bits(masters[1]) == bits(masters[0])


def test_the_state_view_loses_no_write() -> None:
    params = make_params(2)
    optimizer = ShardedAdam(params)
    assert len(optimizer.state) == 0 and dict(optimizer.state[params[0]]) == {}
    fill(params, 0)
    optimizer.step()
    with pytest.raises(StateError, match="load_state_dict"):
        optimizer.state.clear()
    assert len(optimizer.state) == len(params)
    # Surgery assigns another shape before it forgets the state: what the record cannot hold is raised, not dropped.
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(699)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match="exp_avg of shape"):
            call()
    # It also assigns a state before its param is in a group: the state is kept as given, and is no optimizer's state.
    stranger = torch.nn.Parameter(torch.zeros(700))
    with pytest.raises(KeyError):
        optimizer.state[stranger]
    optimizer.state[stranger] = {"step": torch.tensor(1.0)}
    assert optimizer.state[stranger] == {"step": torch.tensor(1.0)} and stranger not in optimizer.state
    optimizer.state = {}
    with pytest.raises(KeyError):
        optimizer.state[stranger]
    assert len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {}
    fresh = make_params(2)
    with torch.no_grad():
        for mine, theirs in zip(fresh, params, strict=True):
            mine.copy_(theirs)
    reference = ShardedAdam(fresh)
    for opt, ps in ((optimizer, params), (reference, fresh)):
        fill(ps, 1)
        opt.step()
    assert bits(params) == bits(fresh)


@pytest.mark.parametrize("bound", [False, True])
def test_one_params_state_is_assigned(bound: bool) -> None:
    params, others = make_params(3), make_params(3)
    source, target = ShardedAdam(params), ShardedAdam(others)
    for step in range(3):
        fill(params, step)
        source.step()
    if bound:
        fill(others, 7)
        target.step()
        kept = target.state_dict()["state"][1]["exp_avg"]
        shown = kept.clone()
    with torch.no_grad():
        for mine, theirs in zip(others, params, strict=True):
            mine.copy_(theirs)
    for param, state in source.state.items():
        twin = next(mine for mine, theirs in zip(others, params, strict=True) if theirs is param)
        target.state[twin] = dict(state)
    if bound:
        assert torch.equal(kept, shown)
    for param, state in target.state.items():  # what a loop does that moves states to the device where they are
        target.state[param] = {name: value.to("cpu") for name, value in state.items()}
    for optimizer, each in ((source, params), (target, others)):
        fill(each, 9)
        optimizer.step()
    assert bits(params) == bits(others) and target.state[others[0]]["step"] == 4
    # {} is back to before the param's first step, and of that one only.
    target.state[others[0]] = {}
    assert len(target.state) == 2 and target.state[others[1]]["step"] == 4
    with pytest.raises(StateError, match="missing"):
        target.state[others[1]] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(700)}
    with pytest.raises(StateError, match="shape"):
        target.state[others[1]] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}


def test_a_kept_state_dict_keeps_what_it_showed() -> None:
    params = make_params(1)
    optimizer = ShardedAdam(params)
    fill(params, 0)
    optimizer.step()
    early = copy.deepcopy(optimizer.state_dict())
    fill(params, 1)
    optimizer.step()
    kept = optimizer.state_dict()
    shown = kept["state"][0]["exp_avg"].clone()
    optimizer.load_state_dict(early)
    assert torch.equal(kept["state"][0]["exp_avg"], shown) and not torch.equal(
        optimizer.state[params[0]]["exp_avg"], shown
    )


def test_a_param_seen_from_elsewhere_is_refused() -> None:
    shared = Parameter(torch.ones(8))
    shared.share_memory_()
    shared.grad = torch.ones(8)
    with pytest.raises(BindingError, match="share_memory"):
        ShardedSGD([shared], lr=0.1).step()
    square = Parameter(torch.arange(4.0).reshape(2, 2))
    optimizer = ShardedSGD([square], lr=0.1)
    square.grad = torch.ones(2, 2)
    optimizer.step()
    expected = square.detach().t() - 0.1
    square.data = square.data.t()
    optimizer.step()
    assert torch.equal(square, expected) and square.is_contiguous()


def test_a_closed_optimizer_says_so() -> None:
    params = make_params(1)
    optimizer = ShardedSGD(params, lr=0.1)
    fill(params, 0)
    optimizer.step()
    optimizer.close()
    for call in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        optimizer.consolidate_state_dict,
    ):
        with pytest.raises(ShardoptError, match="closed"):
            call()


def test_a_step_inside_of_a_compiled_function() -> None:
    model, twin = nn.Linear(5, 5), nn.Linear(5, 5)
    twin.load_state_dict(model.state_dict())
    optimizers = [ShardedAdamW(each.parameters()) for each in (model, twin)]

    def train(each: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
        each(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, on the profiler label that torch puts around every step
        compiled = torch.compile(train, backend="aot_eager")
        for _ in range(3):
            compiled(model, optimizers[0], torch.ones(2, 5))
            train(twin, optimizers[1], torch.ones(2, 5))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# -- several ranks -----------------------------------------------------------------------------------------------------


def outcome(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def flag_of_one_group_toggled() -> list[bytes]:
    params = make_params(4)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = ShardedAdam(groups, tuning=Tuning(bucket_bytes=4000))
    for step in range(3):
        fill(params, step)
        optimizer.step()
        optimizer.param_groups[1]["amsgrad"] = True
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        return bits([state[index][name] for index in sorted(state) for name in sorted(state[index])])
    return []


def parts_that_do_not_fit() -> tuple[list[tuple[str, str]], int]:
    params = make_params()
    old = ShardedAdam(params, tuning=Tuning(bucket_bytes=1))
    fill(params, 0)
    old.step()
    others = make_params()
    new = ShardedAdam(others, tuning=Tuning(bucket_bytes=1 << 20))
    given = old.state_dict()
    if dist.get_rank() == 1:  # no rank has its slices: what ranks lack of loaded states they exchange at binding
        for state in given["state"].values():
            state |= {name: Part(each.local[:0].clone(), 0, each) for name, each in state.items() if name != "step"}
    new.load_state_dict(given)
    fill(others, 0)
    before = bits(others)
    errors = [outcome(new.step) for _ in range(2)]
    assert bits(others) == before
    return errors, sum(param.untyped_storage().nbytes() == 2800 for param in others)


def values_that_differ() -> dict[str, tuple[str, str]]:
    found = {}
    for name in ("gradients", "first weights", "weights"):
        params = make_params()
        if name == "first weights":
            params[1].data[3] += dist.get_rank()
        optimizer = ShardedAdamW(params)
        if name == "weights":
            fill(params, 0)
            optimizer.step()
            if dist.get_rank() == 1:
                with torch.no_grad():
                    params[1].add_(1)
        fill(params, 0)
        if name == "gradients":
            params[0].grad.mul_(dist.get_rank() + 1)
        before = bits(params)
        found[name] = outcome(optimizer.step)
        assert bits(params) == before
    return found


def one_that_nobody_averages() -> tuple[int, str]:
    """Of three params one has gradients of this rank alone. Each step looks at another param; which step noticed."""
    params = make_params()
    optimizer = ShardedSGD(params, lr=0.5)
    for step in range(len(params)):
        fill(params, step)
        params[2].grad.mul_(dist.get_rank() + 1)
        kind, text = outcome(optimizer.step)
        if kind != "no error":
            return step, text
    return len(params), ""


def fails_beside_a_device() -> list[tuple[str, str]]:
    group = for_gpus()
    with beside_a_device(group, lambda: False):
        return fails_in_the_update(False, group)


def fails_in_the_update(neighbours: bool, group: dist.ProcessGroup | None = None) -> list[tuple[str, str]]:
    params = make_params()
    optimizer = ShardedAdamW(params, process_group=group, tuning=Tuning(neighbours=neighbours))
    fill(params, 0)
    optimizer.step()
    fill(params, 1)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with patch.object(native_backend, "run", fail if dist.get_rank() == 0 else native_backend.run):
        first = outcome(optimizer.step)
    return [first, outcome(optimizer.step)]


def group_removed() -> int:
    params = make_params(2)
    optimizer = ShardedAdamW([{"params": params[:1]}, {"params": params[1:]}])
    fill(params, 0)
    optimizer.step()
    del optimizer.param_groups[1]
    optimizer.consolidate_state_dict()
    fill(params, 1)
    optimizer.step()
    return len(optimizer.state)


def copies_of_parts() -> bool:
    params = make_params(1, numel=2000)
    optimizer = ShardedAdam(params)
    fill(params, 0)
    optimizer.step()
    part = optimizer.state[params[0]]["exp_avg"]
    assert isinstance(part, Part)
    return torch.equal(part.clone().full_tensor(), part.full_tensor())


def test_at_several_ranks(ranks: Pool) -> None:
    assert ranks.run(flag_of_one_group_toggled, world=2)[0] == ranks.run(flag_of_one_group_toggled, world=1)[0] != []
    for errors, own_storage in ranks.run(parts_that_do_not_fit, world=2):
        assert [kind for kind, _ in errors] in (["StateError"] * 2, ["DisagreementError"] * 2), errors
        assert own_storage == 3  # nothing was moved into a bucket
    for rank in ranks.run(values_that_differ, world=2):
        assert {kind for kind, _ in rank.values()} == {DisagreementError.__name__}, rank
        assert "gradients differ between ranks" in rank["gradients"][1]
        assert "param 1" in rank["first weights"][1] and "param 1" in rank["weights"][1]
    assert ranks.run(group_removed, world=2) == [1, 1]
    for step, text in ranks.run(one_that_nobody_averages, world=2):
        assert step < 3 and "gradients differ between ranks" in text, "no step looked at the third param"
    assert all(ranks.run(copies_of_parts, world=2))


@pytest.mark.parametrize("connection", ["memory", "messages", "collectives"])
def test_a_failed_update_is_told_to_all_and_ends_training(connection: str, ranks: Pool) -> None:
    if connection == "collectives":
        failing, other = ranks.run(fails_beside_a_device, world=2)
    else:
        failing, other = ranks.run(fails_in_the_update, connection == "memory", world=2)
    assert failing[0] == (MemoryError.__name__, "no room"), failing
    assert other[0][0] == CommunicationError.__name__ and "rank 0 could not go on" in other[0][1], other
    for _, (kind, message) in (failing, other):
        assert kind == "ShardoptError" and "half-way" in message
