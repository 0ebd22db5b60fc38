"""A GPU of CPU tensors: all that is copied to and from it is copied as late as the order that was asked for allows.

An order that a store does not ask for is one that a GPU need not keep. So a copy is made when somebody waits for it,
and what it will be written to is full of NaN until then.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from shardopt import Offload, tiers
from shardopt.offload.lanes import Copy, Lanes

CPU = torch.device("cpu")


@dataclass(eq=False)
class Later:
    """A copy that was asked for, and what comes before it."""

    copies: list[Copy]
    before: list["Later"]
    is_done: bool = False

    def run(self) -> None:
        if not self.is_done:
            for each in self.before:
                each.run()
            for into, source in self.copies:
                into.copy_(source)
            self.is_done = True


@dataclass
class AsLateAsAllowed:
    """Two lanes in which nothing moves until it is waited for. Kernels are done when they return."""

    last: dict[str, Later] = field(default_factory=dict)

    def now(self) -> None:
        return None

    def _put(self, lane: str, copies: Sequence[Copy], behind: Later | None) -> Later:
        before = [each for each in (self.last.get(lane), behind) if each is not None]
        self.last[lane] = Later(list(copies), before)
        return self.last[lane]

    def bring(self, copies: Sequence[Copy], behind: Later | None) -> Later:
        for into, _ in copies:
            into.view(torch.uint8).fill_(0xFF) if behind is None or behind.is_done else None
        return self._put("in", copies, behind)

    def take(self, copies: Sequence[Copy], behind: Later | None) -> Later:
        return self._put("out", copies, behind)

    def join(self, mark: Later | None) -> None:
        if mark is not None:
            mark.run()

    settle = join


@contextmanager
def as_on_a_gpu(lanes: type[Lanes]) -> Iterator[None]:
    """Params on the CPU are offloaded as those on a GPU are: by the same stores, with these lanes."""

    def beside(rests: Offload, tuning: Any) -> Any:
        return tiers._beside(CPU, lanes(), rests, tuning)

    def landing(rests: Offload | None, device: torch.device) -> Any:
        return None if rests is None or rests.gradients is None else tiers._landing_beside(CPU, lanes(), rests)

    with ExitStack() as stack:
        stack.enter_context(patch("shardopt.tiers._beside_cpu", beside))
        stack.enter_context(patch("shardopt.tiers._lanes_to", lambda device: lanes()))
        stack.enter_context(patch("shardopt.binding.make_landing", landing))
        stack.enter_context(patch("shardopt.tiers.register_with_cuda", None))
        for module in ("bind", "optimizer"):
            stack.enter_context(patch(f"shardopt.{module}.check_offload", lambda rests, *_: None))
        away = patch(
            "shardopt.binding.params_rest", lambda rests, device: rests is not None and rests.params is not None
        )
        stack.enter_context(away)
        yield
