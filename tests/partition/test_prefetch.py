"""Stage 3 gathers ahead: from the second step on params travel while the modules before theirs compute.

Modules, gradients and messages note on a rank what happens, in order; no clock is read. A gather is *ahead* if another
module comes to its end between the moment when it is asked for and the moment when it is waited for: so it has that
module's computation to hide behind, however long the two take.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import ShardedSGD, Tuning
from tests.support import llama
from tests.support.ranks import Pool


class Watch:
    """Counts gathers on this rank, each by the messages in which it arrives."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: bound, so that the end of a module's call is noted behind what stage 3 does there."""
        self.ahead = self.on_demand = 0
        self._ended = 0  # computations of modules, forward and backward
        modules = [each for each in model.modules() if isinstance(each, nn.Linear | nn.Embedding)]
        self._weights = [module.weight for module in modules]
        for module in modules:
            module.register_forward_hook(self._note_end)
            module.weight.register_hook(self._note_end)  # its gradient is the last that the module computes

    def _note_end(self, *_: Any) -> None:
        self._ended += 1

    def take(self) -> "Gathers":
        """Those since the last call."""
        found = self.ahead, self.on_demand
        self.ahead = self.on_demand = 0
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        receive = dist.irecv

        def noted(message: Tensor, *arguments: Any, **keywords: Any) -> Any:
            work, ended = receive(message, *arguments, **keywords), self._ended
            return _Waited(work, lambda: self._count(ended)) if self._arrives_in_a_weight(message) else work

        with patch.object(dist, "irecv", noted):
            yield

    def _arrives_in_a_weight(self, message: Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            where = message.untyped_storage()._cdata
            return any(weight.untyped_storage()._cdata == where for weight in self._weights)

    def _count(self, ended_when_asked: int) -> None:
        if self._ended > ended_when_asked:
            self.ahead += 1
        else:
            self.on_demand += 1


class _Waited:
    """A message under way, and what is called when it is waited for."""

    def __init__(self, work: Any, on_wait: Callable[[], None]) -> None:
        self._work, self._on_wait = work, on_wait

    def wait(self, *arguments: Any) -> Any:
        self._on_wait()
        return self._work.wait(*arguments)


Gathers = tuple[int, int]  # ahead, on demand


def gathers(model: nn.Module, loss: Callable[[nn.Module], Tensor], tuning: Tuning) -> list[Gathers]:
    """Of forward and backward by turns, from the second step on; the first one shows what is used when."""
    optimizer = ShardedSGD(model, lr=0.1, stage=3, tuning=tuning)
    optimizer.bind()
    watch, found = Watch(model), []
    for _ in range(3):
        optimizer.zero_grad()
        with watch.watching():
            output = loss(model)
            found.append(watch.take())
            output.backward()
            found.append(watch.take())
        optimizer.step()
    return found[2:]


WIDTH, LAYERS = 64, 6


def a_bucket_a_layer(room: int) -> list[Gathers]:
    """``room``: buckets that may stay."""
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    nbytes = 4 * WIDTH * WIDTH
    tuning = Tuning(bucket_bytes=nbytes, keep_below=1, live_bytes=room * nbytes, neighbours=False)
    return gathers(nn.Sequential(*layers), lambda model: model(torch.ones(2, WIDTH)).sum(), tuning)


def test_what_comes_next_is_asked_for_while_there_is_room(ranks: Pool) -> None:
    for found in ranks.run(a_bucket_a_layer, LAYERS, world=2):
        assert found == [(LAYERS - 1, 1), (0, 0)] * 2  # all of it is still there when backward begins
    for found in ranks.run(a_bucket_a_layer, 3, world=2):
        assert found[1::2] == [(LAYERS - 3, 0)] * 2  # backward begins with the three that stayed


def at_default_settings() -> list[Gathers]:
    # Ranks of one machine would read each other's memory, where there is nothing to be asked for early.
    return gathers(llama.Llama(), llama.loss_of, Tuning(neighbours=False))


@pytest.mark.parametrize("room", [None, 3])
def test_all_but_the_first_gather_are_ahead(room: int | None, ranks: Pool) -> None:
    train, arguments = (at_default_settings, ()) if room is None else (a_bucket_a_layer, (room,))
    for found in ranks.run(train, *arguments, world=2):
        for (ahead, on_demand), most in zip(found, (1, 0) * 2, strict=True):
            if on_demand > most:
                pytest.fail(f"{on_demand} of {ahead + on_demand} gathers were asked for when they were needed")
