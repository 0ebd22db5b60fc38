"""Stage 3: what a module writes to its own param while it runs is kept, or refused; never dropped with its copy."""

import re
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardopt import ReleasedError, ShardedSGD
from tests.support.comparing import snapshot
from tests.support.modules import RATES, W, data, loss_of, nothing_left, plain, poisoned, small, watched
from tests.support.ranks import Pool


class Codebook(nn.Module):
    """A frozen table that follows what it sees, as those of VQ models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(W, W), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = x.detach().mean((0, 1))
            if dist.is_initialized():
                dist.all_reduce(seen)
            with torch.no_grad():
                self.table.lerp_(seen.expand(W, W), 0.1)
        return x @ self.table


class Writing(nn.Module):
    """An embedding whose rows are shortened as they are read, weights that are clipped, a codebook."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.clipped, self.codes = nn.Embedding(40, W, max_norm=1.0), Clipped(), Codebook()
        self.last, self.checkpointed = nn.Linear(W, W), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x[..., 0].abs() * 9).long().clamp(max=39))
        x = checkpoint(self.clipped, x, use_reentrant=False) if self.checkpointed else self.clipped(x)
        return self.last(self.codes(x))


class Clipped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(W, W)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def trained(model: nn.Module, opt: Any) -> tuple[list[bytes], list[float]]:
    losses = []
    for step in range(3):
        opt.zero_grad()
        loss = loss_of(model(data(step, 4, 3, W).to(next(model.parameters()).dtype)).float())
        loss.backward()
        opt.step()
        with torch.no_grad():
            losses += [loss.item(), model(torch.ones(2, 3, W)).sum().item()]
    return snapshot(model, opt), losses


def alone() -> None:
    """One rank: as at stage 1, whether what was gathered stays or not."""
    for checkpointed in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for stage, live_bytes in ((1, 0), (3, 0), (3, 1 << 20)):
                with poisoned() if not live_bytes else nullcontext():
                    model = Writing(checkpointed).to(dtype)
                    opt = ShardedSGD(model, **RATES, stage=stage, tuning=small(live_bytes=live_bytes))
                    results.append(trained(model, opt))
                    opt.close()
            assert results[1] == results[0] and results[2] == results[0], f"{checkpointed}, {dtype}"


def several() -> None:
    """Each rank's gathered copy is its own: refused, with the pattern that keeps the param whole, as at stage 2."""
    expected = trained(wrapped := whole_model(), ShardedSGD(wrapped, **RATES, stage=2))
    keep: list[str] = []
    for _ in range(2):
        model = whole_model()
        with watched() as buckets:
            opt = ShardedSGD(model, **RATES, stage=3, tuning=small(keep=keep))
            try:
                plain(model, 0)
            except ReleasedError as error:
                keep += re.findall(r'Tuning\(keep=\("(.*?)",\)\)', str(error))
            else:
                raise AssertionError(f"kept {keep} only")
            assert nothing_left(buckets)
            with opt.unsharded(), torch.no_grad():  # there it is kept as it ever was
                model(torch.ones(2, 3, W))
            opt.close()
    assert keep == ["clipped.weight", "codes.table"]
    model = whole_model()
    assert trained(model, ShardedSGD(model, **RATES, stage=3, tuning=small(keep=keep))) == expected


def whole_model() -> nn.Module:
    """Without what would write something else on each rank."""
    model = Writing()
    model.embed.max_norm = None
    return DistributedDataParallel(model)


class Resetting(nn.Module):
    """Its first layer writes to the weight of the last one, which is sharded at that moment."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(W, W), nn.Linear(W, W)
        self.first.register_forward_hook(self.reset)

    def reset(self, *_: Any) -> None:
        with torch.no_grad():
            self.last.weight.copy_(torch.eye(W))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def of_another() -> None:
    """A whole tensor that every rank copies into a param of another module is kept, on several ranks too."""
    results = []
    for stage in (1, 3):
        model = Resetting()
        opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
        results.append(trained(model, opt))
        opt.close()
    assert results[1] == results[0]


def test_written_in_forward(ranks: Pool) -> None:
    ranks.run(alone, world=1)
    for world in (1, 2):
        ranks.run(of_another, world=world)
    ranks.run(several, world=2)
