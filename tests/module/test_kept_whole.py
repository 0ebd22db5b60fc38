"""Params that stay whole on every rank by name, at stage 3, and train to the same bits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardopt import (
    BindingError,
    ShardedAdamW,
    ShardedOptimizer,
    ShardoptError,
    Tuning,
)
from shardopt.domain.param_names import matching, name_of
from tests.support.comparing import raw, snapshot
from tests.support.modules import W, data, small
from tests.support.ranks import Pool
from tests.support.training import raises


class Headed(nn.Module):
    """Its own forward reads the weight of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W))
        self.lm_head = nn.Linear(W, 2 * W, bias=False)
        self.base = nn.Linear(W, W).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x) + F.linear(x, self.base.weight), self.lm_head.weight)


def trained(model: nn.Module, **options: Any) -> tuple[list[bytes], ShardedOptimizer]:
    opt = ShardedAdamW(model, lr=0.01, **options)
    for step in range(3):
        opt.zero_grad()
        model(data(step, 4, W)).square().mean().backward()
        opt.step()
    return snapshot(model, opt), opt


def kept() -> None:
    expected, _ = trained(Headed(), stage=2)
    found, opt = trained(Headed(), stage=3, tuning=small())
    assert found == expected  # gathered where they are read; kept whole, nothing travels
    opt.close()
    patterns = ["lm_head.weight", "base.weight"]
    wrapped = DistributedDataParallel(Headed(), find_unused_parameters=True)
    for made, keep in ((Headed(), patterns), (wrapped, ("lm_head", "ba*")), (Headed(), ["*.weight"])):
        found, opt = trained(made, stage=3, tuning=small(keep=keep))
        assert found == expected, keep
        domain = opt.engine.domain
        assert domain is not None and domain.sharded is not None
        entries = {entry.param.shape: entry.shard for entry in domain.entries.values()}
        head, frozen = entries[2 * W, W], [shard.bucket.params for shard in domain.sharded.frozen]
        assert head.gathered is None and not any(param.shape == (W, W) for params in frozen for param in params)
        assert (entries[W, W].gathered is None) == (keep == ["*.weight"])
        state = opt.state[next(param for param in made.parameters() if param.shape == (2 * W, W))]
        assert state["exp_avg"].local.numel() < 2 * W * W  # a slice
        opt.close()


def no_such_name() -> None:
    """Said on every rank, before anything is bound; the same model can then be bound."""
    model = Headed()
    opt = ShardedAdamW(model, stage=3, tuning=small(keep=("lm_head", "lm_hed.*")))
    before = [raw(param) for param in model.parameters()]
    with raises(BindingError, "'lm_hed.*'", "names no param", "body.0.weight"):
        model(data(0, 4, W))
    assert before == [raw(param) for param in model.parameters()]
    opt.close()
    # Ranks that keep others would gather others.
    keep = ("lm_head", "base") if torch.distributed.get_rank() else ("base", "body")
    with raises(ShardoptError, "keep", "lm_head"):
        trained(model, stage=3, tuning=small(keep=keep))


def test_kept_whole(ranks: Pool) -> None:
    ranks.run(kept, world=2)
    ranks.run(no_such_name, world=2)


def test_wrappers_put_nothing_into_names() -> None:
    model = Headed()
    for wrapped in (model, torch.compile(model), nn.Sequential(CheckpointWrapper(model))):
        names = {name_of(wrapped, param) for param in model.lm_head.parameters()}
        assert names == {"0.lm_head.weight" if isinstance(wrapped, nn.Sequential) else "lm_head.weight"}
        assert matching(wrapped, ("*lm_head",)) == {model.lm_head.weight}


def test_a_single_pattern_is_not_taken_for_its_letters() -> None:
    with raises(TypeError, 'keep=("lm_head", "*.norm")'):
        Tuning(keep="lm_head")
