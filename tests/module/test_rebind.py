"""``rebind()``: after surgery on the module a training goes on as torch.optim's, given the states of the same names."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import BindingError, DisagreementError, ShardedAdamW, ShardedOptimizer, ShardoptError
from tests.support.comparing import snapshot
from tests.support.modules import W, small
from tests.support.ranks import Pool
from tests.support.training import raises

RATES = {"lr": 0.01, "eps": 1e-3}
TOKENS = 10


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.scale = nn.Embedding(TOKENS, W), nn.Linear(W, W), nn.Linear(W, W)
        self.head = nn.Linear(W, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale(self.hidden(self.embed(tokens)))))


def enlarged(old: Tensor) -> Tensor:
    new = torch.full((TOKENS + 4, W), 0.1)
    new[:TOKENS] = old.detach()
    return new


def resized(model: Model) -> None:
    """As resize_token_embeddings(): the embedding's Parameter stays, the head is another module."""
    model.embed.weight.data = enlarged(model.embed.weight)
    new = nn.Linear(W, TOKENS + 4, bias=False)
    new.weight.data = enlarged(model.head.weight)
    model.head = new


def replaced(model: Model) -> None:
    """Another layer of the same shape in its place takes its states."""
    torch.manual_seed(3)
    model.hidden = nn.Linear(W, W)


def removed(model: Model) -> None:
    model.scale = nn.Identity()


def added(model: Model) -> None:
    torch.manual_seed(4)
    model.scale = nn.Sequential(model.scale, nn.Linear(W, W))


Surgery = Callable[[Model], None]
SURGERY: dict[str, tuple[Surgery, bool]] = {
    "resized": (resized, False),
    "resized, tied": (lambda model: setattr(model.embed.weight, "data", enlarged(model.embed.weight)), True),
    "replaced": (replaced, False),
    "removed": (removed, False),
    "added": (added, False),
}


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, TOKENS, (6,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return model(tokens).square().mean()


def by_torch(surgery: Surgery, tied: bool) -> list[Tensor]:
    model = Model(tied)
    opt = torch.optim.AdamW(model.parameters(), **RATES)
    for step in range(5):
        if step == 2:
            old = {name: (param, param.shape) for name, param in model.named_parameters()}
            surgery(model)
            before, opt = opt, torch.optim.AdamW(model.parameters(), **RATES)
            for name, param in model.named_parameters():
                stays = next(((was, shape) for was, shape in old.values() if was is param), (None, None))
                was, shape = stays if stays[0] is not None else old.get(name, (None, None))
                if shape == param.shape:
                    opt.state[param] = copy.deepcopy(before.state[was])
        opt.zero_grad()
        loss_of(model, step).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        opt.step()
    return [param.detach() for param in model.parameters()]


def by_shardopt(surgery: Surgery, tied: bool, stage: int, wraps: bool, **options: Any) -> list[Tensor]:
    model = Model(tied)
    whole = DistributedDataParallel(model) if wraps else model
    opt = ShardedAdamW(whole, **RATES, stage=stage, **{"tuning": small(timeout=60), **options})
    for step in range(5):
        if step == 2:
            if "offload" not in options:
                opt.offload("cpu")
            with opt.unsharded():
                surgery(model)
            opt.rebind()
            assert not opt.memory()["state"].get("device")
            opt.reload()
        opt.zero_grad()
        loss_of(whole, step).backward()
        opt.step()
    hooks = [hook for param in model.parameters() for hook in (param._post_accumulate_grad_hooks or {})]
    assert len(hooks) == len(list(model.parameters()))
    with opt.unsharded():
        found = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return found


def all_ways() -> None:
    for name, (surgery, tied) in SURGERY.items():
        expected = by_torch(surgery, tied)
        for stage in (1, 2, 3):
            options = {"tuning": small(timeout=60, neighbours=False)} if stage == 3 and name == "resized" else {}
            found = by_shardopt(surgery, tied, stage, wraps=stage == 1, **options)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, msg=f"{name}, {stage}")


def low_bits(stage: int) -> None:
    """Masters of params that stay keep their low bits; of a new one they are its values."""
    (model, opt), (other, plain) = [(each, made(each, stage)) for each in (Model().bfloat16(), Model().bfloat16())]
    for step in range(4):
        for each, optimizer in ((model, opt), (other, plain)):
            optimizer.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
        if step == 1:
            opt.rebind()
    assert snapshot(model, opt) == snapshot(other, plain)
    assert opt.updates == plain.updates
    steps = {int(state["step"]) for state in opt.state_dict()["state"].values()}
    assert steps == {4}
    with opt.unsharded():
        model.hidden.weight = nn.Parameter(model.hidden.weight.detach().clone())
    opt.rebind()
    number = [name for name, _ in model.named_parameters()].index("hidden.weight")
    master = opt.state_dict()["state"][number]["master"]
    whole = master.full_tensor() if dist.get_world_size() > 1 else master
    assert whole.equal(dict(opt.weights(names=["hidden.weight"]))["hidden.weight"].float())
    opt.close()
    plain.close()


def made(model: nn.Module, stage: int, **options: Any) -> ShardedOptimizer:
    return ShardedAdamW(model, **{**RATES, **options}, stage=stage, tuning=small(timeout=60))


def found_at_the_next_forward(stage: int) -> None:
    model = Model()
    opt = made(model, stage)
    loss_of(model, 0).backward()
    opt.step()
    opt.zero_grad()
    with opt.unsharded():
        model.embed.weight.data = enlarged(model.embed.weight)
    for _ in range(2):
        with raises(BindingError, "call optimizer.rebind()", "embed.weight", "(14, 24)"):
            loss_of(model, 1)
    opt.rebind()
    loss_of(model, 1).backward()
    opt.step()
    model.scale = nn.Sequential(model.scale, nn.Linear(W, W))
    opt.zero_grad()
    loss_of(model, 2).backward()
    with raises(BindingError, "add_param_group", "optimizer.rebind()", "scale.1.weight"):
        opt.step()
    opt.rebind()
    opt.zero_grad()
    loss_of(model, 2).backward()
    opt.step()
    opt.close()


def refused(stage: int) -> None:
    """All or nothing: nothing has changed, and the training goes on."""
    model = Model()
    groups = [{"params": model.embed.parameters()}, {"params": [*model.hidden.parameters(), *model.scale.parameters()]}]
    groups[1]["params"] += list(model.head.parameters())
    opt = ShardedAdamW(groups, module=model, **RATES, stage=stage, tuning=small(timeout=60))
    loss_of(model, 0).backward()
    opt.step()
    before = snapshot(model, opt)
    kept = model.scale
    model.scale = nn.Sequential(kept, nn.Linear(W, W))
    with raises(BindingError, "add_param_group() with scale.1.weight", "2 param groups"):
        opt.rebind()
    model.scale = kept if dist.get_rank() else nn.Identity()
    with raises(DisagreementError, "rebind()"):
        opt.rebind()
    model.scale = kept
    with opt.unsharded(), raises(ShardoptError, "unsharded()", "rebind()") if stage == 3 else raises(TypeError):
        opt.rebind()
        raise TypeError
    assert snapshot(model, opt) == before
    opt.zero_grad()
    loss_of(model, 1).backward()
    opt.step()
    opt.close()
    with raises(ShardoptError, "none was handed over"):
        ShardedAdamW(Model().parameters()).rebind()


def the_rest() -> None:
    for stage in (1, 2, 3):
        low_bits(stage)
        found_at_the_next_forward(stage)
        refused(stage)


def test_rebind(ranks: Pool) -> None:
    ranks.run(all_ways, world=2)


def test_around_it(ranks: Pool) -> None:
    ranks.run(the_rest, world=2)
    ranks.run(low_bits, 3, world=1)
