"""What this rank shows of its states to ranks that read alone, and sees of theirs: between two steps, of one step.

A sharded step needs every rank, so nobody's states move while one rank stays behind a step and reads. A step count
goes with every question: a rank that has not come so far yet waits, one that is further says so.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import StateError
from .partition.serve import Showing
from .shard import Shard

if TYPE_CHECKING:
    from .binding import Binding


@dataclass(frozen=True)
class Fetch:
    """Makes one whole state (or "param") of one param, as it is behind ``step``. Equal ones make the same tensor."""

    exhibit: "Exhibit"
    shard: Shard
    index: int
    name: str
    step: int

    def __call__(self) -> torch.Tensor:
        return self.exhibit.fetch(self.shard, self.index, self.name, self.step)


class Exhibit:
    """The shards of a binding, as other ranks see them."""

    def __init__(self, binding: "Binding"):
        """Collective."""
        self._binding = binding
        self._settled = 0  # steps that all ranks agreed on and this one has come to the end of
        self._written: torch.cuda.Event | None = None  # behind the last of them
        self._showing = Showing.begin(binding.mesh.shard, self)

    def settle(self) -> None:
        """This rank has come to the end of a step."""
        if self._binding.device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record()
        self._settled = self._binding.rounds

    def retire(self) -> None:
        """The optimizer is gone. What the other ranks may still read stays for as long as they may."""
        if self._showing is not None:
            self._showing.retire()

    def close(self) -> None:
        """Nothing is shown any more."""
        if self._showing is not None:
            self._showing.close()

    # -- seeing ----------------------------------------------------------------------------------------------------

    def fetcher(self, shard: Shard, index: int, name: str) -> Callable[[], torch.Tensor] | None:
        """What makes the whole state ``name`` (or "param") of a param as it is now, in host memory, on demand."""
        return None if self._showing is None else Fetch(self, shard, index, name, self._settled)

    def fetch(self, shard: Shard, index: int, name: str, step: int) -> torch.Tensor:
        mesh, param = self._binding.mesh, shard.bucket.params[index]
        shown = self._shown
        if self._showing is None or self._settled != step or shard not in shown:
            raise StateError(
                f"{name} of a param of shape {tuple(param.shape)} was looked at behind step {step} and is read behind "
                f"step {self._settled}: it lies in shards, which have moved on. Take state_dict() again, and save it "
                "before the next step."
            )
        layout = shard.bucket.layout
        flat: torch.Tensor | None = None
        for rank in range(mesh.shard.size):
            for piece in layout.pieces(rank):
                if piece.param != index:
                    continue
                if flat is None:
                    flat = torch.empty(layout.numels[index], dtype=param.dtype if name == "param" else torch.float32)
                target = flat[piece.start : piece.start + piece.numel]
                if rank == mesh.shard.rank:
                    target.copy_(shard.read_chunk(name, piece.shard_start, piece.shard_end))
                else:
                    self._showing.read(rank, step, shown.index(shard), name, piece.shard_start, target)
        if flat is None:  # no elements
            flat = torch.empty(0, dtype=param.dtype if name == "param" else torch.float32)
        return flat.as_strided(param.size(), shard.strides(index))

    @property
    def _shown(self) -> list[Shard]:
        """What ranks may ask each other for; in the same order on all of them."""
        binding = self._binding
        return [*binding.shards, *(binding.sharded.frozen if binding.sharded is not None else ())]

    # -- being seen ------------------------------------------------------------------------------------------------

    def slice_at(self, step: int, shard: int, name: str, start: int, stop: int) -> torch.Tensor:
        """For another rank, in a thread of its own; see :class:`shardopt.partition.serve.Readable`."""
        binding, shown = self._binding, self._shown
        end = time.monotonic() + binding.mesh.world.seconds
        while self._settled < step and binding.broken is None:
            if time.monotonic() > end:
                raise StateError(f"this rank has not come to the end of step {step}.")
            time.sleep(0.001)
        if binding.broken is not None:
            raise StateError(f"a step of this rank failed half-way ({binding.broken}).")
        if self._settled > step or shard >= len(shown):
            raise StateError(f"this rank is behind step {self._settled}, not {step}, or closed.")
        if shown[shard].device.type == "cpu":
            return shown[shard].read_chunk(name, start, stop)
        # On a stream of its own behind the step's kernels. It allocates nothing on the device, where a collective may
        # be waiting for the rank that asks.
        with torch.cuda.stream(torch.cuda.Stream(shown[shard].device)):
            if self._written is not None:
                self._written.wait()
            return shown[shard].read_chunk(name, start, stop).cpu()
