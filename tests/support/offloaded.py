"""What tests of offloaded states share: params of several chunks, their steps and bits, whole trainings."""

import copy
import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from shardopt import ShardedOptimizer, Tuning
from tests.step.test_stages import FEW_STEPS, Ended, Recipe, Setting, check_same_bits, reference, train, with_steps
from tests.support.cases import Zoo, fill_gradients
from tests.support.late_copies import AsLateAsAllowed, as_on_a_gpu
from tests.support.ranks import Pool
from tests.support.training import raw

CHUNK = 4096  # bytes: 1,024 elements, so that the longest params have several chunks and the short ones share one
STEPS = FEW_STEPS  # "auto" goes from one way to the other after the third

# -- params without a module -------------------------------------------------------------------------------------------


class Menagerie(Zoo):
    """With a param of several chunks and a piece."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.long = Parameter(torch.linspace(-1, 1, 3 * 1024 + 77).to(dtype))


def make(ours: Any, offload: Any, dtype: torch.dtype, **keywords: Any) -> tuple[list[Parameter], ShardedOptimizer]:
    params = list(Menagerie(dtype).parameters())
    tuning = Tuning(chunk_bytes=CHUNK, bucket_bytes=6000, nonfinite="propagate", compress_from=256)
    return params, ours(params, **copy.deepcopy(keywords), offload=offload, tuning=tuning)


def advance(params: list[Parameter], optimizer: ShardedOptimizer, steps: Iterable[int]) -> None:
    for step in steps:
        fill_gradients(params, ("heavy_tailed", "integers", "log_uniform")[step % 3], step)
        if step % 2:
            params[-1].grad = None  # its chunks are not even read
        optimizer.step()


def bits(params: list[Parameter], optimizer: ShardedOptimizer) -> list[bytes]:
    states = [optimizer.state[param] for param in params]
    return [raw(param) for param in params] + [
        name.encode() + raw(value) for state in states for name, value in state.items()
    ]


# -- trainings of a module ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resting(Setting):
    """A setting with its states elsewhere."""

    offload: Any = "cpu"

    def options(self, recipe: Recipe) -> dict[str, Any]:
        options = super().options(recipe)
        tuning = Tuning(**{**vars(options["tuning"]), "chunk_bytes": CHUNK})
        return {**options, "tuning": tuning, "offload": self.offload}


def at_rest(stage: int, neighbours: bool, wrapped: bool = False, **where: Any) -> Resting:
    """Of larger buckets where each is a message in every forward and backward."""
    return Resting(stage, wrapped, neighbours, 6000 if stage == 3 and not neighbours else 1200, **where)


def trainings(calls: Sequence[tuple[str, Setting]], around: Callable[[], AbstractContextManager[Any]]) -> list[Ended]:
    """On the ranks: several trainings, each within a context of its own."""
    found = []
    for name, setting in calls:
        with around():
            found.append(train(with_steps(name, STEPS), setting))
        gc.collect()  # at stage 3 a sharded module keeps its optimizer
    return found


def check_trainings(
    calls: Sequence[tuple[str, Setting]],
    ranks: Pool,
    world: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Each recipe in its setting leaves the bits of the same training in one process, in memory and in fp32."""
    by_rank = ranks.run(trainings, calls, around, world=world)
    for number, (name, setting) in enumerate(calls):
        check_same_bits(reference(name, STEPS), [ended[number] for ended in by_rank], (name, setting))


# Params on the CPU, offloaded as those on a GPU are.
on_a_gpu = functools.partial(as_on_a_gpu, AsLateAsAllowed)
