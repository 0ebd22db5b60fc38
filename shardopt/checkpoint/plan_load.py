"""Plans a load: which elements of the checkpoint this rank reads, and where they go."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..domain.param_state import ParamState
from ..errors import CheckpointError
from ..kernels.formats import FP32, format_of
from ..rules.rule import EMA
from ..tensors.strides import flattened
from .elements import (
    Write,
    flat_of,
    is_dense,
    same_order,
    shard_writer,
    strides_of,
    writer_of,
)
from .fit import Fit
from .model import Model, ModelParam
from .reader import Checkpoint, Chunk, chunks_of, needed_chunks
from .records import Key, Manifest, Tensor

Deliver = Callable[[torch.Tensor], Any]  # takes a whole tensor with the shape of the one that was saved


@dataclass(frozen=True)
class Target:
    """Elements ``[start, stop)`` of a saved tensor, and what writes them here. ``write`` counts from ``start``."""

    key: Key
    tensor: Tensor
    start: int
    stop: int
    write: Write

    def chunks(self, manifest: Manifest) -> Iterator[Chunk]:
        """Yields all chunks that its values are made of."""
        return needed_chunks(manifest, self.key, self.start, self.stop)

    def fill(self, checkpoint: Checkpoint) -> None:
        for chunk in chunks_of(self.key, self.tensor, self.start, self.stop):
            first, last = max(chunk.start, self.start), min(chunk.stop, self.stop)
            values = checkpoint.values(chunk)[first - chunk.start : last - chunk.start]
            self.write(first - self.start, values)


@dataclass(frozen=True)
class WholeTarget:
    """A tensor with another storage order here, or without flat memory: read whole on the host, then delivered."""

    key: Key
    tensor: Tensor
    deliver: Deliver

    def chunks(self, manifest: Manifest) -> Iterator[Chunk]:
        return needed_chunks(manifest, self.key)

    def fill(self, checkpoint: Checkpoint) -> None:
        self.deliver(checkpoint.whole(self.key))


@dataclass
class LoadPlan:
    """One rank's part in loading.

    Attributes:
        targets: in the order in which they are filled.
        gradients: of this rank alone, which were not reduced; filled like targets.
        waiting: states for params that no optimizer has bound: whole, on the host.
        rounded: (kind, format that it was saved in, shorter one that it is kept in) -> params.
    """

    targets: list[Target | WholeTarget] = field(default_factory=list)
    gradients: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    waiting: dict[torch.nn.Parameter, ParamState] = field(default_factory=dict)
    rounded: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def losses(self) -> tuple[str, ...]:
        """Returns in words which of the checkpoint's precision is lost here."""
        return tuple(
            f"{kind} of {count} params was saved in {saved} and is rounded to {kept}"
            for (kind, saved, kept), count in self.rounded.items()
        )


def plan_load(manifest: Manifest, model: Model, fit: Fit) -> LoadPlan:
    """Returns the plan for what fits. Allocates states that are not there yet; changes no value.

    Raises:
        CheckpointError: there is no memory to load into.
    """
    return _Planner(manifest, model).plan(fit)


class _Planner:
    def __init__(self, manifest: Manifest, model: Model):
        self.manifest, self.model, self.made = manifest, model, LoadPlan()
        self.accumulated: dict[str, list[str]] = {}
        for key, _ in manifest.of("gradients"):
            self.accumulated.setdefault(key.name, []).append(key.kind)

    def plan(self, fit: Fit) -> LoadPlan:
        for name, saved in fit.params.items():
            member = self.model.params[name]
            if member.param.is_meta:
                raise CheckpointError(
                    f"give the optimizer of {name!r} too, or call module.to_empty(device=...) first: it is on the meta "
                    "device and has no memory to load into."
                )
            if member.shard is None or member.shard.gathered is None:
                self._plain(Key("params", saved, "param"), member.param)
            else:
                self._slice(member, Key("params", saved, "param"))
            if name in fit.states:
                self._states(member, saved)
            self._gradients(member, saved)
        for name in fit.buffers:
            self._plain(Key("buffers", name, "value"), self.model.buffers[name])
        return self.made

    def _deliver(self, key: Key, deliver: Deliver) -> None:
        self.made.targets.append(WholeTarget(key, self.manifest.tensors[key], deliver))

    def _states(self, member: ModelParam, saved: str) -> None:
        keeps_average = member.optimizer is not None and self.model.engines[member.optimizer].rule.average is not None
        kinds = [kind for kind in self.manifest.kinds[saved] if kind != "param" and (kind != EMA or keeps_average)]
        if member.entry is not None and member.shard is not None:
            member.shard.ensure_states(kind for kind in kinds if kind != "master")
            for kind in kinds:
                key, format = Key("params", saved, kind), "the param"  # a master that is not kept here
                if kind != "master" or member.shard.masters:
                    format = member.shard.format_of(kind).name
                    self._slice(member, key)
                encoding = self.manifest.tensors[key].encoding or FP32.name
                if format not in (FP32.name, encoding):
                    self.made.rounded[kind, encoding, format] += 1
        elif self.manifest.params[saved]["has_state"]:
            about = self.manifest.params[saved]
            state = ParamState(about["step"], carried_of(about))
            self.made.waiting[member.param] = state
            for kind in kinds:
                self._deliver(Key("params", saved, kind), partial(state.tensors.__setitem__, kind))

    def _slice(self, member: ModelParam, key: Key) -> None:
        """Plans the elements of a tensor that lie in this rank's shard."""
        shard, tensor = member.shard, self.manifest.tensors[key]
        assert shard is not None
        where = shard.slice_of(member.index)
        numel = where.local.stop - where.local.start
        write = shard_writer(shard, key.kind, where.local.start)
        if key.section == "gradients":
            assert member.entry is not None and member.entry.gradient_slice is not None
            write = writer_of(member.entry.gradient_slice.total)
        if same_order(tensor.shape, tensor.strides, shard.strides(member.index)):
            self.made.targets.append(Target(key, tensor, where.start, where.start + numel, write))
            return

        def deliver(whole: torch.Tensor) -> None:
            ordered = flattened(shard.ordered(member.index, whole))
            write(0, ordered[where.start : where.start + numel])

        self._deliver(key, deliver)

    def _gradients(self, member: ModelParam, saved: str) -> None:
        """Plans the gradients that were accumulated since the last step."""
        kinds = self.accumulated.get(saved)
        if not kinds:
            return
        if member.entry is None or member.entry.gradient_slice is None:
            raise CheckpointError(
                "hand the module over (ShardedAdamW(module, ...)), without release_gradients, as when it was saved: "
                f"the checkpoint's accumulated gradients of {saved!r} would be lost."
            )
        if "reduced" in kinds:
            key, kept = Key("gradients", saved, "reduced"), member.entry.gradient_slice.total.dtype
            self._slice(member, key)
            if self.manifest.tensors[key].dtype.itemsize > kept.itemsize:
                self.made.rounded["gradient", FP32.name, format_of(kept, "a gradient").name] += 1
        world = self.model.world
        own = [kind for kind in kinds if kind != "reduced"]
        if own and self.manifest.info["world"] != world.size:
            raise CheckpointError(
                f"load this checkpoint at as many ranks, or save before no_sync(): {self.manifest.info['world']} ranks "
                f"accumulated gradients of {saved!r} under no_sync(), which {world.size} ranks cannot divide."
            )
        if str(world.rank) in own:
            param = member.param

            def deliver(whole: torch.Tensor) -> None:
                self.made.gradients[param] = whole.to(param.device)

            self._deliver(Key("gradients", saved, str(world.rank)), deliver)

    def _plain(self, key: Key, to: torch.Tensor) -> None:
        """Plans all elements of a tensor that is whole on this rank."""
        tensor = self.manifest.tensors[key]
        if is_dense(to) and same_order(tensor.shape, tensor.strides, strides_of(to)):
            self.made.targets.append(Target(key, tensor, 0, tensor.numel, writer_of(flat_of(to))))
        else:
            self._deliver(key, to.detach().copy_)


def carried_of(about: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scalars that a rule hands on from step to step, to the bit."""
    return {name: float.fromhex(value) for name, value in about["carried"].items()}
