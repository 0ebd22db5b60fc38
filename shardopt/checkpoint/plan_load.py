"""Plans a load: which elements of the checkpoint this rank reads, and where they go."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
from .reader import Checkpoint, chunks_of
from .records import Key, Manifest


@dataclass(frozen=True)
class Target:
    """Elements ``[start, stop)`` of a saved tensor, and what brings them from the checkpoint to where they belong."""

    key: Key
    start: int
    stop: int
    fill: Callable[[Checkpoint], object]


class LoadPlan:
    """One rank's part in loading what fits. Making it allocates states that are not there yet, and changes no value.

    Attributes:
        targets: in the order in which they are filled.
        gradients: of this rank alone, which were not reduced; filled like targets.
        waiting: states for params that no optimizer has bound: whole, on the host.
        rounded: (kind, format that it was saved in, shorter one that it is kept in) -> params.
    """

    def __init__(self, manifest: Manifest, model: Model, fit: Fit):
        """
        Raises:
            CheckpointError: there is no memory to load into.
        """
        self.targets: list[Target] = []
        self.gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.waiting: dict[torch.nn.Parameter, ParamState] = {}
        self.rounded: Counter[tuple[str, str, str]] = Counter()
        self._manifest, self._model = manifest, model
        self._accumulated: dict[str, set[str]] = defaultdict(set)
        for key, _ in manifest.of("gradients"):
            self._accumulated[key.name].add(key.kind)
        for name, saved in fit.params.items():
            member = model.params[name]
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
            self._plain(Key("buffers", name, "value"), model.buffers[name])

    def losses(self) -> tuple[str, ...]:
        """Returns in words which of the checkpoint's precision is lost here."""
        return tuple(
            f"{kind} of {count} params was saved in {saved} and is rounded to {kept}"
            for (kind, saved, kept), count in self.rounded.items()
        )

    def _deliver(self, key: Key, deliver: Callable[[torch.Tensor], object]) -> None:
        """Plans a tensor with another storage order here, or without flat memory: read whole on the host."""
        numel = self._manifest.tensors[key].numel
        self.targets.append(Target(key, 0, numel, lambda checkpoint: deliver(checkpoint.whole(key))))

    def _write(self, key: Key, start: int, stop: int, write: Write) -> None:
        """Plans elements ``[start, stop)``, a chunk at a time; ``write`` counts from ``start``."""

        def fill(checkpoint: Checkpoint) -> None:
            for chunk in chunks_of(key, checkpoint.manifest.tensors[key], start, stop):
                first, last = max(chunk.start, start), min(chunk.stop, stop)
                write(first - start, checkpoint.values(chunk)[first - chunk.start : last - chunk.start])

        self.targets.append(Target(key, start, stop, fill))

    def _states(self, member: ModelParam, saved: str) -> None:
        keeps_average = member.optimizer is not None and self._model.engines[member.optimizer].rule.average is not None
        kinds = [kind for kind in self._manifest.kinds[saved] if kind != "param" and (kind != EMA or keeps_average)]
        if member.entry is not None and member.shard is not None:
            member.shard.ensure_states(kind for kind in kinds if kind != "master")
            for kind in kinds:
                key, format = Key("params", saved, kind), "the param"  # a master that is not kept here
                if kind != "master" or member.shard.masters:
                    format = member.shard.format_of(kind).name
                    self._slice(member, key)
                encoding = self._manifest.tensors[key].encoding or FP32.name
                if format not in (FP32.name, encoding):
                    self.rounded[kind, encoding, format] += 1
        elif self._manifest.params[saved]["has_state"]:
            about = self._manifest.params[saved]
            state = ParamState(about["step"], self._manifest.carried(saved))
            self.waiting[member.param] = state
            for kind in kinds:
                self._deliver(Key("params", saved, kind), partial(state.tensors.__setitem__, kind))

    def _slice(self, member: ModelParam, key: Key) -> None:
        """Plans the elements of a tensor that lie in this rank's shard."""
        shard, tensor = member.shard, self._manifest.tensors[key]
        assert shard is not None
        where = shard.slice_of(member.index)
        numel = where.local.stop - where.local.start
        write = shard_writer(shard, key.kind, where.local.start)
        if key.section == "gradients":
            assert member.entry is not None and member.entry.gradient_slice is not None
            write = writer_of(member.entry.gradient_slice.total)
        if same_order(tensor.shape, tensor.strides, shard.strides(member.index)):
            self._write(key, where.start, where.start + numel, write)
            return

        def deliver(whole: torch.Tensor) -> None:
            ordered = flattened(shard.ordered(member.index, whole))
            write(0, ordered[where.start : where.start + numel])

        self._deliver(key, deliver)

    def _gradients(self, member: ModelParam, saved: str) -> None:
        """Plans the gradients that were accumulated since the last step."""
        kinds = self._accumulated[saved]
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
            if self._manifest.tensors[key].dtype.itemsize > kept.itemsize:
                self.rounded["gradient", FP32.name, format_of(kept, "a gradient").name] += 1
        world, saved_by = self._model.world, self._manifest.info["world"]
        own = kinds - {"reduced"}
        if own and saved_by != world.size:
            raise CheckpointError(
                f"load this checkpoint at as many ranks, or save before no_sync(): {saved_by} ranks "
                f"accumulated gradients of {saved!r} under no_sync(), which {world.size} ranks cannot divide."
            )
        if str(world.rank) in own:
            param = member.param

            def deliver(whole: torch.Tensor) -> None:
                self.gradients[param] = whole.to(param.device)

            self._deliver(Key("gradients", saved, str(world.rank)), deliver)

    def _plain(self, key: Key, to: torch.Tensor) -> None:
        """Plans all elements of a tensor that is whole on this rank."""
        tensor = self._manifest.tensors[key]
        if is_dense(to) and same_order(tensor.shape, tensor.strides, strides_of(to)):
            self._write(key, 0, tensor.numel, writer_of(flat_of(to)))
        else:
            self._deliver(key, to.detach().copy_)
