"""Ranks that share one GPU, over gloo: params and gradients travel through host memory. For tests alone."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch

from shardopt.domain import connect
from shardopt.partition.comm.all_gather import AllGather, Window, by_messages
from shardopt.partition.comm.group import Ranks, Traffic
from shardopt.partition.comm.reduce_scatter import ReduceScatter, Reduction
from shardopt.partition.comm.reduce_scatter_p2p import P2PReduceScatter
from shardopt.partition.comm.transport import Transport


@contextmanager
def through_host() -> Iterator[None]:
    """Within, optimizers that are bound move tensors of any device over gloo."""
    with (
        patch.object(Transport, "of", lambda ranks, device, *_: HostTransport(ranks, device)),
        patch.object(connect, "Transport", HostTransport),  # of params that are offloaded
    ):
        yield


class HostTransport(Transport):
    def all_gather(self, phase: str, limit: timedelta | None = None, evaluates: bool = False) -> AllGather:
        return by_copies(self.ranks, phase)

    def reduce_scatter(self, is_coded: bool = False) -> ReduceScatter:
        assert not is_coded, "no test sends encoded gradients through host memory"
        if self.ranks.size == 1:
            return super().reduce_scatter()
        return StagedReduceScatter(self.ranks, self.traffic, self._number)


def by_copies(ranks: Ranks, phase: str) -> AllGather:
    """Sends copies in host memory."""

    def begin(window: Window) -> Callable[[], None]:
        copy, messages = Window(window.flat.cpu(), window.shard_numel, window.number), by_messages(ranks, phase)
        messages.start(copy)

        def end() -> None:
            messages.finish()
            window.flat.copy_(copy.flat)

        return end

    return AllGather(begin)


class StagedReduceScatter:
    """Sums copies in host memory."""

    notifies_peers = on_stream = by_messages = False

    def __init__(self, ranks: Ranks, traffic: Traffic, number: int):
        self._messages = P2PReduceScatter(ranks, traffic, number)
        self._reductions: deque[tuple[Reduction, Reduction]] = deque()

    def share(self, dtype: torch.dtype) -> float:
        return 1.0

    def start_round(self, round_number: int, closure: int = 0) -> None:
        self._messages.start_round(round_number)
        self._reductions.clear()

    def start(self, reduction: Reduction) -> None:
        staged = Reduction(reduction.buffer.cpu(), reduction.target.cpu(), reduction.add)
        self._messages.start(staged)
        self._reductions.append((reduction, staged))

    def progress(self) -> list[Reduction]:
        return []

    def drain(self, limit: int, patience: float) -> list[Reduction]:
        return self._give_back(self._messages.drain(limit, patience))

    def finish(self) -> list[Reduction]:
        return self._give_back(self._messages.finish())

    def _give_back(self, drained: list[Reduction]) -> list[Reduction]:
        ended = []
        for _ in drained:
            reduction, staged = self._reductions.popleft()
            reduction.target.copy_(staged.target)
            ended.append(reduction)
        return ended

    def fail_closure(self, closure: int) -> None:
        pass

    def abandon_round(self, round_number: int, rest: Any) -> None:
        self._messages.abandon_round(round_number, rest)

    def catch_up(self, round_number: int) -> None:
        pass
