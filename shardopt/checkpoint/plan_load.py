"""Which elements of a checkpoint this rank reads and where they go: decided first, then followed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..domain.param_state import ParamState
from ..errors import CheckpointError
from ..kernels.formats import FP32, format_of
from ..rules.rule import EMA
from ..tensors.strides import flattened
from .elements import Elements, Flat, InShard, flat_of, is_dense, same_order, strides_of
from .fit import Fit
from .manifest import Manifest
from .model import Model, ModelParam
from .reader import Checkpoint, Chunk, chunks_of, needed_chunks
from .records import Key, Tensor

Deliver = Callable[[torch.Tensor], None]  # takes a whole tensor with the shape of the one that was saved


@dataclass(frozen=True)
class Target:
    """Elements ``[start, stop)`` of a saved tensor go to ``elements``, from ``offset`` on."""

    key: Key
    tensor: Tensor
    start: int
    stop: int
    elements: Elements
    offset: int

    def chunks(self, manifest: Manifest) -> Iterator[Chunk]:
        """All that it is made of."""
        return needed_chunks(manifest, self.key, self.start, self.stop)

    def fill(self, checkpoint: Checkpoint) -> None:
        for chunk in chunks_of(self.key, self.tensor, self.start, self.stop):
            first, last = max(chunk.start, self.start), min(chunk.stop, self.stop)
            values = checkpoint.values(chunk)[first - chunk.start : last - chunk.start]
            self.elements.write(self.offset + first - self.start, values)


@dataclass(frozen=True)
class Detour:
    """A tensor that lies in another storage order here, or in no flat memory: read whole on the host, and handed on."""

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

    targets: list[Target | Detour] = field(default_factory=list)
    gradients: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    waiting: dict[torch.nn.Parameter, ParamState] = field(default_factory=dict)
    rounded: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def losses(self) -> tuple[str, ...]:
        """What of the checkpoint's precision is not kept here, in words."""
        return tuple(
            f"{kind} of {count} params was saved in {saved} and is rounded to {kept}"
            for (kind, saved, kept), count in self.rounded.items()
        )


def plan_load(manifest: Manifest, model: Model, fit: Fit) -> LoadPlan:
    """The plan for what fits. Allocates states that are not there yet; changes no value.

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
            home = self.model.params[name]
            if home.param.is_meta:
                raise CheckpointError(
                    f"{name!r} is on the meta device and has no memory to load into: give its optimizer too, which "
                    "makes some, or call module.to_empty(device=...) first."
                )
            self._param(home, Key("params", saved, "param"))
            if name in fit.states:
                self._states(home, saved)
            self._gradients(home, saved)
        for name in fit.buffers:
            self._plain(Key("buffers", name, "value"), self.model.buffers[name])
        return self.made

    def _param(self, home: ModelParam, key: Key) -> None:
        shard = home.shard
        if shard is None or shard.gathered is None:
            self._plain(key, home.param)
        else:
            self._slice(home, key)

    def _states(self, home: ModelParam, saved: str) -> None:
        keeps_average = home.optimizer is not None and self.model.engines[home.optimizer].rule.average is not None
        kinds = [kind for kind in self.manifest.kinds[saved] if kind != "param" and (kind != EMA or keeps_average)]
        if home.entry is not None and home.shard is not None:
            home.shard.ensure_states(kind for kind in kinds if kind != "master")
            for kind in kinds:
                if kind != "master" or home.shard.masters:
                    key, kept = Key("params", saved, kind), home.shard.format_of(kind).name
                    self._slice(home, key)
                    encoding = self.manifest.tensors[key].encoding or FP32.name
                    if kept not in (FP32.name, encoding):
                        self.made.rounded[kind, encoding, kept] += 1
                else:
                    encoding = self.manifest.tensors[Key("params", saved, kind)].encoding or FP32.name
                    self.made.rounded[kind, encoding, "the param"] += 1
        elif self.manifest.params[saved]["has_state"]:
            about = self.manifest.params[saved]
            state = ParamState(about["step"], carried_of(about))
            self.made.waiting[home.param] = state
            for kind in kinds:
                self._wait_for(state, Key("params", saved, kind))

    def _wait_for(self, state: ParamState, key: Key) -> None:
        def deliver(whole: torch.Tensor) -> None:
            state.tensors[key.kind] = whole

        self.made.targets.append(Detour(key, self.manifest.tensors[key], deliver))

    def _slice(self, home: ModelParam, key: Key) -> None:
        """What of the tensor lies in this rank's shard."""
        shard, tensor = home.shard, self.manifest.tensors[key]
        assert shard is not None
        where = shard.slice_of(home.index)
        numel = where.local.stop - where.local.start
        elements: Elements = InShard(shard, key.kind, where.local.start)
        if key.section == "gradients":
            assert home.entry is not None and home.entry.gradient_slice is not None
            elements = Flat(home.entry.gradient_slice.total)
        if same_order(tensor.shape, tensor.strides, shard.strides(home.index)):
            self.made.targets.append(Target(key, tensor, where.start, where.start + numel, elements, 0))
            return

        def deliver(whole: torch.Tensor) -> None:
            ordered = flattened(shard.ordered(home.index, whole))
            elements.write(0, ordered[where.start : where.start + numel])

        self.made.targets.append(Detour(key, tensor, deliver))

    def _gradients(self, home: ModelParam, saved: str) -> None:
        """What was accumulated since the last step."""
        kinds = self.accumulated.get(saved)
        if not kinds:
            return
        if home.entry is None or home.entry.gradient_slice is None:
            raise CheckpointError(
                f"the checkpoint holds accumulated gradients of {saved!r}, and the optimizer does not keep them: they "
                "would be lost. Hand the module over (ShardedAdamW(module, ...)), without release_gradients, as it was "
                "when it was saved."
            )
        if "reduced" in kinds:
            key, kept = Key("gradients", saved, "reduced"), home.entry.gradient_slice.total.dtype
            self._slice(home, key)
            if self.manifest.tensors[key].dtype.itemsize > kept.itemsize:
                self.made.rounded["gradient", FP32.name, format_of(kept, "a gradient").name] += 1
        world = self.model.world
        own = [kind for kind in kinds if kind != "reduced"]
        if own and self.manifest.info["world"] != world.size:
            raise CheckpointError(
                f"the checkpoint holds gradients of {saved!r} that {self.manifest.info['world']} ranks accumulated "
                f"under no_sync(), each its own: {world.size} ranks cannot share them out. Load it at as many ranks, "
                "or save before no_sync()."
            )
        if str(world.rank) in own:
            param = home.param

            def deliver(whole: torch.Tensor) -> None:
                self.made.gradients[param] = whole.to(param.device)

            key = Key("gradients", saved, str(world.rank))
            self.made.targets.append(Detour(key, self.manifest.tensors[key], deliver))

    def _plain(self, key: Key, to: torch.Tensor) -> None:
        """All of it, into a tensor that is whole on this rank."""
        tensor = self.manifest.tensors[key]
        if is_dense(to) and same_order(tensor.shape, tensor.strides, strides_of(to)):
            self.made.targets.append(Target(key, tensor, 0, tensor.numel, Flat(flat_of(to)), 0))
        else:
            self.made.targets.append(Detour(key, tensor, _copier(to)))


def _copier(to: torch.Tensor) -> Deliver:
    def deliver(whole: torch.Tensor) -> None:
        to.detach().copy_(whole)

    return deliver


def carried_of(about: Mapping[str, Any]) -> dict[str, float]:
    """Scalars that a rule hands on from step to step, to the bit."""
    return {name: float.fromhex(value) for name, value in about["carried"].items()}
