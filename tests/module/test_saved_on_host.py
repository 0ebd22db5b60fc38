"""Activations can rest on the host by torch's own ``save_on_cpu``, where shardopt has the module: bit for bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from shardopt import ShardedAdamW, Tuning
from tests.support.ranks import Pool
from tests.support.training import Net, loss_of

SMALL = Tuning(bucket_bytes=2000, keep_below=100, live_bytes=0)
Saving = Callable[[], AbstractContextManager[Any]]


def trained(stage: int, saving: Saving, checkpointed: bool) -> list[torch.Tensor]:
    model = Net(checkpointed=checkpointed)
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=SMALL)
    for step in range(2):
        for turn in range(2):
            with saving():
                loss = loss_of(model, 10 * step + turn)
            loss.backward()
        opt.step()
        opt.zero_grad()
    with opt.unsharded():
        found = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return found


def composes() -> None:
    for stage, checkpointed in ((2, False), (3, False), (3, True)):
        expected = trained(stage, nullcontext, checkpointed)
        # With pin_memory each tensor is copied, as from a GPU; without, those of a CPU stay where they are.
        for saving in (save_on_cpu, lambda: save_on_cpu(pin_memory=True)):
            for ours, theirs in zip(trained(stage, saving, checkpointed), expected, strict=True):
                assert torch.equal(ours, theirs), (stage, checkpointed)
    # Weights are saved for backward too: whole ones, as gathered. A checkpoint saves the input of its block alone.
    for checkpointed in (False, True):
        shapes: set[tuple[int, ...]] = set()
        seen = saved_tensors_hooks(lambda each: (shapes.add(tuple(each.shape)), each)[1], lambda each: each)  # noqa: B023
        trained(3, lambda: seen, checkpointed)  # noqa: B023
        assert ((20, 31) in shapes or (31, 20) in shapes) is not checkpointed, shapes
        assert (4, 7, 20) in shapes


def test_activations_on_the_host_change_no_bit(ranks: Pool) -> None:
    ranks.run(composes, world=2)
