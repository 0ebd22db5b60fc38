"""Weights that others write, copies of model and optimizer, bytes on each rank."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardopt import (
    CheckpointError,
    Part,
    ShardedAdamW,
    ShardedSGD,
    ShardoptError,
    Tuning,
    save_checkpoint,
)
from tests.support.cases import Zoo, fill_gradients
from tests.support.ranks import Pool
from tests.support.training import Net, ddp, digest, load_bytes, raises, raw, saved_bytes

# -- weights written by others, copies, ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_the_neighbour_of_a_tie_is_kept_when_it_is_written(offload: str | None) -> None:
    """A master half-way between two bf16 numbers was rounded to the even one: the other one is what somebody wrote.

    Unless the master was loaded: it may have been a split one, whose ties are rounded away from zero.
    """
    upper = torch.arange(0x3F80, 0x3F80 + 150, dtype=torch.int32)
    masters = ((upper << 16) + 0x8000).view(torch.float32)
    masters = torch.cat([masters, -masters])
    even, away = masters.bfloat16(), (masters.view(torch.int32) + 0x8000 >> 16).short().view(torch.bfloat16)
    for way in ("loaded", "in place", "through .data"):
        param = Parameter((away if way == "loaded" else even).clone())
        opt = ShardedSGD([param], lr=0.0, momentum=0.5, offload=offload)
        state = {"momentum_buffer": torch.ones_like(masters), "master": masters}
        opt.load_state_dict({**opt.state_dict(), "state": {0: state}})
        param.grad = torch.ones_like(param)
        opt.step()
        assert raw(opt.state[param]["master"]) == raw(masters) and raw(param) == raw(even), way
        if way == "in place":
            with torch.no_grad():
                param.copy_(away)
        elif way == "through .data":
            param.data.copy_(away)
        opt.step()
        assert raw(param) == raw(even if way == "loaded" else away), way
        expected = masters if way == "loaded" else torch.where(away == even, masters, away.float())
        assert raw(opt.state[param]["master"]) == raw(expected), way


def written_weights() -> None:
    """Masters follow weights that were written; elements that the write left alone keep their low bits."""
    for way in ("in place", "through .data"):
        params = [param for param in Zoo(torch.bfloat16).parameters() if param.requires_grad]
        opt = ShardedSGD(params, lr=0.01, momentum=0.9)
        for step in range(3):
            fill_gradients(params, "heavy_tailed", step)
            opt.step()
        masters = [
            opt.state[param]["master"].full_tensor()
            if dist.get_world_size() > 1
            else opt.state[param]["master"].clone()
            for param in params
        ]
        assert any((master != param.float()).any() for master, param in zip(masters, params, strict=True))
        values = [param.detach().clone() for param in params]
        for value in values:
            value[torch.arange(value.numel()).reshape(value.shape) % 2 == 0] = 0.25
        for param, value in zip(params, values, strict=True):
            if way == "in place":
                with torch.no_grad():
                    param.copy_(value)
            else:
                param.data.copy_(value)
            param.grad = None
        if way == "in place":
            fill_gradients(params[:1], "integers", 0)
            params[0].grad.zero_()
            opt.step()
        for which, (param, value, master) in enumerate(zip(params, values, masters, strict=True)):
            now = opt.state[param]["master"]
            now = now.full_tensor() if isinstance(now, Part) else now
            if which == 0 and way == "in place":
                continue  # the momentum moved it
            kept = master.bfloat16() == value
            assert torch.equal(now, torch.where(kept, master, value.float())), f"{way}, param {which}"


def copies() -> None:
    model = ddp(Net()) if dist.get_world_size() > 1 else Net()
    opt = ShardedAdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        fill_gradients(model.parameters(), "integers", step)
        opt.step()
    other_model, other = copy.deepcopy((list(model.parameters()), opt))
    before = digest(opt)
    assert digest(other) == before
    for step in range(3, 6):
        fill_gradients(other_model, "integers", step)
        other.step()
    assert digest(opt) == before
    for step in range(3, 6):
        fill_gradients(model.parameters(), "integers", step)
        opt.step()
    assert digest(opt) == digest(other)
    kept = [raw(param) for param in model.parameters()]
    opt.close()
    with raises(ShardoptError, "closed"):
        opt.step()
    assert [raw(param) for param in model.parameters()] == kept
    again = ShardedAdamW(model.parameters(), lr=1e-2)
    again.load_state_dict(load_bytes(saved_bytes(other)))
    for params, optimizer in ((list(model.parameters()), again), (other_model, other)):
        fill_gradients(params, "integers", 6)
        optimizer.step()
    assert digest(again) == digest(other)


def memory_is_the_formula() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (0, 1):
            numels = (100_000, 257, 1, 0, 30_000)
            params = [Parameter(torch.randn(numel).to(dtype)) for numel in numels]
            opt = ShardedAdamW(params, stage=stage, tuning=Tuning(bucket_bytes=1 << 30))
            for param in params:
                param.grad = torch.ones_like(param)
            opt.step()
            shards = dist.get_world_size() if stage else 1
            blocks = sum(-(-numel // 256) for numel in numels)
            per_shard = -(-blocks // shards) * 256
            size = params[0].element_size()
            assert opt.memory() == {
                "param": {"device": per_shard * shards * size},
                "gradient": {"device": sum(numels) * size},
                "master": {"device": 4 * per_shard if dtype is torch.bfloat16 else 0},
                "state": {"device": 8 * per_shard},
                "buffer": {"device": per_shard // 256 * 4},
            }
            held = sum(
                opt.state[param][name].untyped_storage().nbytes() if not isinstance(opt.state[param][name], Part) else 0
                for param in params[:1]
                for name in ("exp_avg",)
            )
            assert stage or held == 4 * per_shard


def low_bits_wait_for_weights(folder: str) -> None:
    """States are loaded before weights: masters are shown, saved and go on as they were, whole or in halves."""
    for master in ("split", "split24", "fp32"):
        trained = [param for param in Zoo(torch.bfloat16).parameters() if param.requires_grad]
        opt = ShardedSGD(trained, lr=0.01, momentum=0.9, master=master)
        for step in range(3):
            fill_gradients(trained, "heavy_tailed", step)
            opt.step()
        data = saved_bytes(opt)
        expected = {number: raw(state["master"]) for number, state in load_bytes(data)["state"].items()}

        module = torch.nn.ParameterList(p for p in Zoo(torch.bfloat16, seed=5).parameters() if p.requires_grad)
        params = list(module)
        other = ShardedSGD(params, lr=0.01, momentum=0.9, master=master)
        fill_gradients(params, "integers", 0)
        other.step()
        other.load_state_dict(load_bytes(data))
        between = load_bytes(saved_bytes(other))
        assert {number: raw(state["master"]) for number, state in between["state"].items()} == expected, master
        if master == "fp32":
            save_checkpoint(f"{folder}/{master}", module, other)
        else:
            with raises(CheckpointError, "weights before this save", "refresh_masters()"):
                save_checkpoint(f"{folder}/{master}", module, other)
            save_checkpoint(f"{folder}/{master}", module, other, full_precision=True)
        with torch.no_grad():
            for param, value in zip(params, trained, strict=True):
                param.copy_(value)
        save_checkpoint(f"{folder}/{master}", module, other)
        assert digest(other) == digest(opt)
        other.load_state_dict(between)
        for optimizer, its in ((opt, trained), (other, params)):
            fill_gradients(its, "integers", 4)
            optimizer.step()
        assert digest(other) == digest(opt)
        # These weights are meant: masters follow them.
        other.load_state_dict(load_bytes(data))
        other.refresh_masters()
        save_checkpoint(f"{folder}/followed-{master}", module, other)
        assert all(
            raw(s["master"].bfloat16()) == raw(p)
            for s, p in zip(load_bytes(saved_bytes(other))["state"].values(), params, strict=True)
        )


def test_low_bits_wait_for_weights(ranks: Pool, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks.run(low_bits_wait_for_weights, str(tmp_path / str(world)), world=world)


def test_weights_copies_memory(ranks: Pool) -> None:
    for world in (1, 2, 3):
        for function in (written_weights, copies, memory_is_the_formula):
            ranks.run(function, world=world)
