"""Ranks as on GPUs, without one: collectives carry params and gradients, and the host that waits for one hears nothing.

The group is torch's own, for tensors of a GPU alone, so that what ranks tell each other travels beside it. What its
collectives carry lies on the CPU here, and a gloo group carries it in their place.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from shardopt.partition.comm import collectives
from shardopt.partition.comm.group import Ranks
from tests.support.moments import until


class Carried:
    """A collective of the device. As NCCL's it tells nobody that a rank is gone, and never ends then."""

    def __init__(self, work: Any, is_in_vain: Callable[[], bool], end: Callable[[], object] = lambda: None):
        """``end`` puts the result in its place."""
        self._work, self._is_in_vain, self._end = work, is_in_vain, end

    def is_completed(self) -> bool:
        return self._work.is_completed() and self._is_whole()

    def _is_whole(self) -> bool:
        try:
            self._work.wait()
        except RuntimeError:  # gloo hears of it
            return False
        return True

    def wait(self, deadline: timedelta | None = None) -> bool:
        """The values are needed at once here, and the host waits for them: unless that is in vain."""
        until(lambda: self._work.is_completed() or self._is_in_vain(), "a collective")
        if self.is_completed():
            self._end()
        return True


def for_gpus(ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """Collective over all ranks: a group that carries no host memory."""
    group = dist.new_group(ranks, backend="cuda:gloo", **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def beside_a_device(group_of_gpus: dist.ProcessGroup, is_in_vain: Callable[[], bool]) -> Iterator[None]:
    """Collective. Within, collectives of the group carry params and gradients.

    Args:
        group_of_gpus: see :func:`for_gpus`; of all ranks.
        is_in_vain: whether a rank is gone that a collective may wait for.
    """
    carrier = dist.new_group()

    def carried(collective: Any) -> Any:
        def call(*tensors: Tensor, group: Any) -> Any:
            if group is not group_of_gpus:
                return collective(*tensors, group=group)
            return Carried(collective(*tensors, group=carrier), is_in_vain)

        return call

    # gloo's own ends only when somebody waits for it.
    def reduce_scatter(output: Tensor, values: Tensor, group: Any) -> Carried:
        sums, numel = values.clone(), output.numel()
        own = sums[carrier.rank() * numel : (carrier.rank() + 1) * numel]
        work = dist.all_reduce(sums, group=carrier, async_op=True)
        return Carried(work, is_in_vain, lambda: output.copy_(own))

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather"):
            stack.enter_context(patch.object(collectives, name, carried(getattr(collectives, name))))
        stack.enter_context(patch.object(collectives, "reduce_scatter", reduce_scatter))
        stack.enter_context(patch.object(Ranks, "has_collectives", lambda ranks, _: ranks.group is group_of_gpus))
        yield
