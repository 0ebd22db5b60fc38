"""torch.distributed.checkpoint as a destination: saved by some ranks, loaded by others and by torch, bit for bit."""

import math
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import shardopt
from shardopt.tensors.boxes import boxes
from tests.support.checkpoints import Whole, build, facts, train
from tests.support.ranks import Pool

STEPS = range(2)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_hold_each_element_once_in_order(sizes: list[int], data: st.DataObject) -> None:
    shape, numel = tuple(sizes), math.prod(sizes)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found, elements = boxes(shape, start, stop), []
    assert len(found) <= max(2 * len(shape) - 1, 1)
    for box in found:
        assert box.start == start + len(elements)
        for at in product(*(range(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))):
            flat = 0
            for index, size in zip(at, shape, strict=True):
                flat = flat * size + index
            elements.append(flat)
    assert elements == list(range(start, stop))


def test_the_picture_of_boxes() -> None:
    assert boxes((4, 5), 3, 17) == [((0, 3), (1, 2), 3), ((1, 0), (2, 5), 5), ((3, 0), (1, 2), 15)]


def quiet() -> None:
    # Torch warns of its own types, and of a single process.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")


def saved(path: str, stage: int) -> dict[str, str]:
    quiet()
    model, optimizer = build(stage)
    train(model, optimizer, STEPS)
    dcp.save({"model": model.state_dict(), "optim": optimizer}, checkpoint_id=path)
    found = facts(model, optimizer)
    train(model, optimizer, range(2, 4))
    return {f"before {key}": value for key, value in found.items()} | facts(model, optimizer)


def loaded(path: str, stage: int) -> dict[str, str]:
    quiet()
    model, optimizer = build(stage, seed=5, bucket_bytes=5000)
    shardopt.prepare_states(optimizer)
    with torch.no_grad():
        for param in model.parameters():
            assert stage == 3 or not torch.isnan(param).any()
    weights = model.state_dict()
    dcp.load({"model": weights, "optim": optimizer}, checkpoint_id=path)
    model.load_state_dict(weights)
    found = facts(model, optimizer)
    train(model, optimizer, range(2, 4))
    return {f"before {key}": value for key, value in found.items()} | facts(model, optimizer)


def test_two_ranks_save_and_three_and_one_go_on(ranks: Pool, tmp_path: Path) -> None:
    wanted = ranks.run(saved, str(tmp_path), 2, world=2)[0]
    assert len(wanted) > 60
    for world, stage in ((3, 2), (3, 3), (1, 1)):
        found = ranks.run(loaded, str(tmp_path), stage, world=world)[0]
        assert found == wanted, (world, stage, [key for key in wanted if found.get(key) != wanted[key]])


def loaded_by_torch(path: str) -> dict[str, Any]:
    quiet()
    model = Whole(5)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}], amsgrad=True)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()  # torch fills what it finds
    weights = {name: value for name, value in model.state_dict().items()}
    dcp.load({"model": weights, "optim": optimizer}, checkpoint_id=path, no_dist=True)
    model.load_state_dict(weights)
    return {"weights": weights, "states": optimizer.state_dict(), "lr": optimizer.param_groups[0]["lr"]}


def whole(path: str) -> dict[str, Any]:
    quiet()
    model, optimizer = build(2)
    train(model, optimizer, STEPS)
    dcp.save({"model": model.state_dict(), "optim": optimizer}, checkpoint_id=path)
    optimizer.consolidate_state_dict(to=0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "states": optimizer.state_dict() if torch.distributed.get_rank() == 0 else {}}


def test_torch_alone_loads_it(ranks: Pool, tmp_path: Path) -> None:
    wanted = ranks.run(whole, str(tmp_path), world=2)[0]
    found = ranks.run(loaded_by_torch, str(tmp_path), world=1, group=False)[0]
    assert found["lr"] == 0.01
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name
    low = 0
    for index, state in wanted["states"]["state"].items():
        own = found["states"]["state"][index]
        for kind, value in state.items():
            if kind == "master":
                low += 1  # torch keeps none, and its moments of a bf16 param are bf16
            else:
                assert torch.equal(own[kind], value.to(own[kind].dtype)), (index, kind)
    assert low == 2


def test_states_that_a_step_alone_can_begin_are_refused() -> None:
    with pytest.raises(shardopt.StateError, match="mu_product"):
        shardopt.prepare_states(shardopt.ShardedNAdam([torch.nn.Parameter(torch.zeros(3))]))


def test_what_no_step_could_use_is_not_bound() -> None:
    """Before a state is made: of a rate that is not one number, as a step says it."""
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = shardopt.ShardedSGD([param], lr=0.5, momentum=0.5)
    optimizer.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(TypeError, match=r"assign a number to \['lr'\] of param group 0"):
        shardopt.prepare_states(optimizer)
    assert not optimizer.state and "not bound" in repr(optimizer)


def test_prepared_states_are_those_of_a_first_step() -> None:
    found = []
    for prepared in (False, True):
        model, optimizer = build(1)
        if prepared:
            shardopt.prepare_states(optimizer)
            assert all(float(state["step"]) == 0 for state in optimizer.state_dict()["state"].values())
        train(model, optimizer, STEPS)
        found.append(facts(model, optimizer))
    assert found[0] == found[1]
