"""Serves this rank's slices of mean gradients to a rank that reads alone, and reads those of other ranks.

Between a backward and the step that uses it no rank waits for another: one may have clipped its gradients, another may
still read them. So a moment goes with every request: the round that made a gradient, and the changes in place since.
A rank that has read a gradient keeps its slice of that moment when it changes it, for ranks that come later::

    rank 0   backward 7   sum() at (7, 0) . ask ............ clip: (7, 1)   step
    rank 1   backward 7   sum() at (7, 0) . clip: (7, 1)     step: waits for rank 0
             thread                          . answer of (7, 0), which was kept

A rank that is before the moment lets the reader wait. One that is past it, and has not read it itself, answers with an
error at once, and so does one that waits in its step: it changes no gradient any more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ..errors import StateError
from ..remote.epoch import Moment
from ..tensors.gradient_slice import GradientSlice, divide_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ..partition.mesh import Mesh
    from .param import ParamRecord
    from .shard import Shard
    from .turn import Turn


class Reducing(Protocol):
    """The part of a domain that shows its gradients; a protocol, since ``domain.py`` imports this module."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def entries(self) -> Mapping[torch.nn.Parameter, ParamRecord]: ...
    @property
    def remote(self) -> Any: ...
    @property
    def turn(self) -> Turn: ...
    @property
    def broken(self) -> str | None: ...
    @property
    def steps_agreed(self) -> int: ...


_NAME = "gradient"  # of what is asked for, with the index of the param behind it
_UNSETTLED = 1.0  # seconds after which an edit that is under way counts as one that broke off


def names_gradient(name: str) -> bool:
    """True if a rank asks for a slice of a gradient, and not of a state."""
    return name.startswith(_NAME)


@dataclass(eq=False)
class GradientFetch:
    """Reads the whole mean gradient of one param into host memory, as it is at a moment.

    The last one that was read is kept: scripts ask several questions of one gradient after the other.
    """

    domain: Reducing
    shard: Shard
    index: int

    @property
    def steps(self) -> int:
        """The number of steps that were taken."""
        return self.domain.steps_agreed

    def __call__(self, moment: tuple[int, int]) -> torch.Tensor:
        remote = self.domain.remote
        if remote is None:
            raise StateError(
                "call full_tensor() on every rank: what was asked of param.grad needs the other ranks' slices, and "
                "this rank cannot read them alone (some rank could open no socket)."
            )
        gradient_slice = _entry(self.domain, self.shard, self.index).gradient_slice
        assert gradient_slice is not None
        last = remote.last_gradient
        if last is not None and last[:2] == (self, moment) and not gradient_slice.was_written:
            return cast(torch.Tensor, last[2])
        whole = self._read(gradient_slice, moment)
        remote.last_gradient = self, moment, whole
        return whole

    def _read(self, own: GradientSlice, moment: tuple[int, int]) -> torch.Tensor:
        domain, shard, remote = self.domain, self.shard, self.domain.remote
        assert remote is not None
        if mean_of(own, moment, 0, 0) is None:  # the same on all ranks, whether they hold elements or not
            raise StateError(
                "make a copy of param.grad that is to last of full_tensor() on every rank, or use it in place "
                "(param.grad.add_(copy)): it holds this rank's slice, and the gradient has changed since. It is of "
                f"round {moment[0]} with {moment[1]} changes in place; now it is round {own.round} with "
                f"{own.edit_count}."
            )
        layout, mine = shard.bucket.layout, domain.mesh.shard.rank
        flat = torch.empty(layout.numels[self.index], dtype=own.total.dtype)
        for rank in range(domain.mesh.shard.size):
            for piece in layout.pieces(rank):
                if piece.param == self.index:
                    target = flat[piece.start : piece.start + piece.numel]
                    if rank == mine:
                        copied = mean_of(own, moment, 0, piece.numel)
                        assert copied is not None, "only this thread changes the slice"
                        target.copy_(copied)
                    else:
                        name = f"{_NAME} {self.index}"
                        remote.peers.read(rank, Moment(*moment), domain.shards.index(shard), name, 0, target)
        return flat


@contextmanager
def mean_at(
    domain: Reducing,
    moment: Moment,
    number: int,
    name: str,
    start: int,
    stop: int,
    copying: Callable[[], AbstractContextManager[object]],
) -> Iterator[torch.Tensor]:
    """A context of a thread of the server; see ``Readable`` there. ``start`` counts from the slice's first element.

    Args:
        copying: returns the context in which memory of a device is copied; see :mod:`.remote_states`.
    """
    gradient_slice = _entry(domain, domain.shards[number], int(name.split()[1])).gradient_slice
    if gradient_slice is None:
        raise StateError("ask before close(): that rank has closed its optimizer, and its gradients are gone.")
    end = time.monotonic() + domain.mesh.world.seconds
    copied: torch.Tensor | None = None
    while copied is None:
        _await(domain, gradient_slice, moment, end)
        with copying():
            copied = mean_of(gradient_slice, moment, start, stop)
    yield copied


def mean_of(gradient_slice: GradientSlice, moment: tuple[int, int], start: int, stop: int) -> torch.Tensor | None:
    """Returns a copy of some elements in host memory, 1D; None if the slice has changed since the moment."""
    kept = gradient_slice.kept.get(moment)
    if kept is not None:
        mean, written = kept
        if written is not None:
            written.wait()
        return _on_host(mean[start:stop])
    divisor, written = gradient_slice.divisor, gradient_slice.written
    if written is not None:
        written.wait()
    copied = _on_host(gradient_slice.total[start:stop])
    divide_(copied, divisor)
    is_same = not gradient_slice.is_moving and gradient_slice.moment == moment
    return copied if is_same and (divisor, written) == (gradient_slice.divisor, gradient_slice.written) else None


def _on_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.numel(), dtype=values.dtype).copy_(values)


def _await(domain: Reducing, gradient_slice: GradientSlice, moment: Moment, end: float) -> None:
    """Waits until this rank has come to the moment, and nothing changes the slice.

    Raises:
        StateError: the moment has passed, or will not come.
    """
    moving_since: float | None = None
    while moment not in gradient_slice.kept:
        # In this order: whoever changes the slice says so before, and sets the new moment before it marks the end.
        is_moving, now = gradient_slice.is_moving, gradient_slice.moment
        if now == moment and not is_moving:
            return
        clock = time.monotonic()
        moving_since = None if now < moment or not is_moving else moving_since or clock
        is_broken_off = moving_since is not None and clock > moving_since + _UNSETTLED
        if (now > moment and not is_moving) or is_broken_off or (now < moment and domain.turn.call == "step()"):
            raise StateError(
                "ask on all ranks at the same place, or call gradient_statistics() or full_tensor() on every rank: "
                "that rank has changed or dropped this gradient, or will change it no "
                f"more. It is at round {now[0]} with {now[1]} changes in place, asked for was round {moment[0]} with "
                f"{moment[1]}."
            )
        if domain.broken is not None or clock > end:
            raise StateError(f"that rank did not come to round {moment[0]} of its gradients: it is at {now[0]}.")
        time.sleep(0.0005)


def _entry(domain: Reducing, shard: Shard, index: int) -> ParamRecord:
    param = shard.bucket.params[index]
    return domain.entries[param]
