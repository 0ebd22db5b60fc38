"""Inf, NaN, loss scaling and clipping: one decision by all ranks, before any bit changes."""

import copy
import hashlib
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from shardopt import Part, ShardedAdamW, ShardedSGD, ShardoptError, Tuning
from tests.support.cases import Zoo, fill_gradients
from tests.support.ranks import Pool
from tests.support.training import Net, close_to, ddp, digest, loss_of, raises, raw

# -- overflow, scaling, clipping ---------------------------------------------------------------------------------------


def scalers() -> None:
    """Both protocols; an overflow on one rank, through DDP and without it, is skipped by all."""
    for fused in (False, True):
        # Where nothing reduces the gradients, only the fused protocol lets the ranks decide together.
        for reduced in (True, False) if fused else (True,):
            for bad in (math.inf, math.nan, -math.inf):
                model: nn.Module = Net()
                model = ddp(model) if reduced else model
                opt = ShardedSGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused or None)
                twin = copy.deepcopy(model)
                torch_opt = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                for step in range(4):
                    opt.zero_grad()
                    spoiled = step == 2 and dist.get_rank() == 1
                    if reduced:
                        loss = loss_of(model, step)
                        scaler.scale(loss * bad if spoiled else loss).backward()
                    else:
                        fill_gradients(model.parameters(), "integers", step)
                        scaler.scale(torch.zeros(()))  # makes the scale
                        if spoiled:
                            list(model.parameters())[3].grad.view(-1)[-1] = bad
                    if step == 2:
                        before = digest(opt)
                    else:
                        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                            other.grad = param.grad / scaler.get_scale()
                        torch_opt.step()
                    scaler.step(opt)
                    scaler.update()
                    if step == 2:
                        assert digest(opt) == before, f"fused={fused} reduced={reduced} {bad}"
                        # Without DDP only the rank that overflowed may lower its scale by itself: agree as DDP would.
                        scaler.update(512.0)
                    assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
                close_to(model, twin)


def trainable() -> list[Parameter]:
    return [param for param in Zoo().parameters() if param.requires_grad]


def nonfinite_policies() -> None:
    """One bad element, in each param, on one rank."""
    for policy in ("skip", "raise", "propagate"):
        for stage in (0, 1):
            for where, numel in enumerate(param.numel() for param in trainable()):
                # What is found is the same whatever follows: "skip" has each param, the others one of four.
                if not numel or (policy != "skip" and where % 4 != stage):
                    continue
                params = trainable()
                opt = ShardedAdamW(params, stage=stage, tuning=Tuning(nonfinite=policy))
                fill_gradients(params, "integers", 0)
                opt.step()
                before = digest(opt)
                fill_gradients(params, "integers", 1)
                # On one rank: the one that updates this element, which may be the only one to see it.
                element = params[where].numel() - 1 if where % 2 else 0
                state = opt.state[params[where]]["exp_avg"]
                if not isinstance(state, Part):
                    sees = dist.get_rank() == where % dist.get_world_size()
                else:
                    sees = state.start <= element < state.start + state.local.numel()
                if sees or policy == "propagate":  # which asks for the same gradients on all ranks, as always
                    params[where].grad.view(-1)[element] = math.nan
                if policy == "raise":
                    with raises(ShardoptError, "Inf or NaN", "nothing changed"):
                        opt.step()
                else:
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        opt.step()
                    assert any("skipped this step" in str(each.message) for each in caught) == (policy == "skip")
                if policy == "propagate":
                    assert params[where].isnan().sum() == 1 and sum(int(p.isnan().sum()) for p in params) == 1
                else:
                    assert digest(opt) == before
                fill_gradients(params, "integers", 2)
                opt.step()
                assert digest(opt) != before


def clipping(stage: int) -> list[str]:
    """torch's clip_grad_norm_ before the step, and the clipping that is part of it."""
    digests = []
    for bound in (0.05, 1e6):
        models = [Net() for _ in range(3)]
        fused = ShardedSGD(models[0].parameters(), lr=0.1, momentum=0.9, max_grad_norm=bound, stage=stage)
        plain = ShardedSGD(models[1].parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(models[2].parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            for model in models:
                fill_gradients(model.parameters(), "heavy_tailed" if step % 2 else "integers", step)
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), bound) for model in models[1:]]
            fused.step()
            plain.step()
            theirs.step()
            assert norms[0] == norms[1]
            assert fused.grad_norm == pytest.approx(float(norms[0]), rel=1e-6)
        close_to(models[0], models[2])
        close_to(models[1], models[2])
        digests.append(hashlib.sha256(b"".join(raw(param) for param in models[0].parameters())).hexdigest())
    return digests


def test_overflow_and_clipping(ranks: Pool) -> None:
    ranks.run(scalers, world=2)
    for world in (1, 2, 3):
        ranks.run(nonfinite_policies, world=world)
    digests = [each for world in (1, 2, 3) for stage in (0, 1) for each in ranks.run(clipping, stage, world=world)]
    assert all(each == digests[0] for each in digests) and digests[0][0] != digests[0][1]
