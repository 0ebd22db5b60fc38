"""Parts and params as files without pickle see them: by the memory that they say is theirs."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.utils.dlpack import to_dlpack

from shardopt import Part, ShardedAdamW, StateError, Tuning
from tests.support.ranks import Pool
from tests.support.training import Net as Plain
from tests.support.training import raises, train_step

SMALL = Tuning(bucket_bytes=2000, keep_below=100)


class Tied(Plain):
    """With a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(20, 31)
        self.again.weight = self.hidden.weight


def saves_by_memory(folder: str, stage: int) -> None:
    rank, model = dist.get_rank(), Tied()
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=SMALL)
    model.again.bias.requires_grad_(False)
    for step in range(2):
        train_step(model, opt, step)
    path = Path(folder) / f"stage{stage}"
    if rank == 0:
        shown = model.state_dict()
        # No two params lie in one storage but the tied ones, which do.
        places = {name: value.untyped_storage().data_ptr() for name, value in shown.items()}
        assert places["again.weight"] == places["hidden.weight"] and len(set(places.values())) == len(shown) - 1
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in shown.values())
        save_model(model, f"{path}.model")
        states = {
            f"{index}.{name}": value
            for index, state in opt.state_dict()["state"].items()
            for name, value in state.items()
        }
        save_file(states, f"{path}.states")
    dist.barrier()
    part = opt.state_dict()["state"][0]["exp_avg"].clone()
    assert isinstance(part, Part) and part.data_ptr() == part.untyped_storage().data_ptr()
    opt.consolidate_state_dict(to=0)
    with opt.unsharded():
        if rank == 0:
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            read = load_file(f"{path}.model")
            assert set(expected) - set(read) <= {"again.weight", "hidden.weight"} and len(read) == len(expected) - 1
            assert all(torch.equal(value, expected[name]) for name, value in read.items())
            read = load_file(f"{path}.states")
            for index, state in opt.state_dict()["state"].items():
                assert all(torch.equal(value, read[f"{index}.{name}"]) for name, value in state.items())
        dist.barrier()
    opt.close()


def gradients_have_no_memory() -> None:
    model = Plain()
    opt = ShardedAdamW(model, stage=2)
    model(torch.zeros(1, 7, dtype=torch.int64)).sum().backward()
    with raises(StateError, "data_ptr()", "full_tensor()"):
        model.out.weight.grad.data_ptr()
    opt.close()


def test_files_without_pickle(ranks: Pool, tmp_path: Path) -> None:
    for stage in (1, 3):
        ranks.run(saves_by_memory, str(tmp_path), stage, world=2)
    ranks.run(gradients_have_no_memory, world=2)


def has_no_address(stage: int) -> None:
    """What torch does at a tensor's address is refused by name: there is nothing, and it would crash."""
    model = nn.Linear(300, 300)
    opt = ShardedAdamW(model, stage=stage, release_gradients=stage == 1)
    model(torch.ones(2, 300)).sum().backward()
    parts = [model.weight.grad, Part(torch.ones(300), 0, model.weight)]
    other = torch.ones(300, 300)
    for part in parts:
        assert isinstance(part, Part)
        shared = "before module.share_memory()" if stage == 2 and part is parts[0] else "untyped_storage() was called"
        for refused, words in (
            (lambda part=part: part.apply_(abs), "apply_() was called"),
            (lambda part=part: part.map_(other, lambda mine, its: mine), "map_() was called"),
            (lambda part=part: part.map2_(other, other, lambda mine, its, more: mine), "map2_() was called"),
            (lambda part=part: part.const_data_ptr(), "const_data_ptr() was called"),
            *([] if stage == 2 and part is parts[0] else [(lambda part=part: setattr(part, "data", other), ".data")]),
            (lambda part=part: part.share_memory_(), shared),
            (lambda part=part: np.from_dlpack(part), "__dlpack__() was called"),
            (lambda part=part: torch.from_dlpack(part), " was called on "),  # whatever torch asks for first
        ):
            with raises(StateError, words):
                refused()
        # C functions ask no class: the error is torch's own.
        for call in (to_dlpack, torch._C._to_dlpack_versioned):
            with raises(RuntimeError, "Cannot access data pointer"):
                call(part)
    with raises(StateError, "untyped_storage() was"):
        parts[1].untyped_storage().share_memory_()
    if stage == 2:
        with raises(StateError, "optimizer.close() before module.share_memory()"):
            model.share_memory()
    opt.close()
    model.zero_grad()
    assert all(param.is_shared() for param in model.share_memory().parameters())


def test_a_part_has_no_address(ranks: Pool) -> None:
    for stage in (1, 2):
        ranks.run(has_no_address, stage, world=1)
