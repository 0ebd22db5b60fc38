"""Plans a load: which elements of the checkpoint this rank reads, and where they go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..domain.param_state import ParamState
from ..errors import CheckpointError
from ..kernels.formats import FORMATS, FP32, BlockFormat, format_of
from ..rules.rule import EMA
from .assemble import Assembly, Source, sources_of
from .block import Block, Frame
from .elements import contiguous_strides, flat_of, is_dense, same_order, shard_writer, strides_of, writer_of
from .reader import chunks_of, needed_chunks
from .records import Key

if TYPE_CHECKING:
    from .elements import Write
    from .fit import Fit
    from .meeting import Crowd
    from .model import Model, ModelParam
    from .reader import Checkpoint, Chunk
    from .records import Manifest


@dataclass(frozen=True)
class Target:
    """The chunks of which elements are made, and what brings them from the checkpoint to where they belong."""

    chunks: Callable[[], Iterator[Chunk]]
    fill: Callable[[Checkpoint], object]


class LoadPlan:
    """One rank's part in loading what fits. Making it allocates states that are not there yet, and changes no value.

    Attributes:
        targets: in the order in which they are filled.
        gradients: of this rank alone, which were not reduced; filled like targets.
        sums: what was saved of reduced gradients, which targets bring.
        margins: by param, whole, of those that are bound.
        waiting: states for params that no optimizer has bound: whole, on the host.
        rounded: (kind, format that it was saved in, shorter one that it is kept in) -> params.
    """

    def __init__(self, manifest: Manifest, model: Model, fit: Fit, world: Crowd):
        """
        Args:
            world: all ranks that load.

        Raises:
            CheckpointError: there is no memory to load into.
        """
        self.targets: list[Target] = []
        self.gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.sums: dict[torch.nn.Parameter, Mapping[str, Any]] = {}
        self.margins: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        self.waiting: dict[torch.nn.Parameter, ParamState] = {}
        self.rounded: Counter[tuple[str, str, str]] = Counter()
        self._manifest, self._model, self._world = manifest, model, world
        self._accumulated: dict[str, set[str]] = defaultdict(set)
        for key, _ in manifest.of("gradients"):
            self._accumulated[manifest.param_of[key.name]].add(key.kind)
        for name, saved in fit.params.items():
            member = model.params[name]
            if member.param.is_meta:
                raise CheckpointError(
                    f"give the optimizer of {name!r} too, or call module.to_empty(device=...) first: it is on the meta "
                    "device and has no memory to load into."
                )
            if member.shard is None or member.shard.gathered is None:
                self._plain(self._sources(member, saved, "param"), member.block, member.param)
            else:
                self._slice(member, saved, "param")
            if name in fit.states:
                self._states(member, saved)
            self._gradients(member, saved)
        for name in fit.buffers:
            key, buffer = Key("buffers", name, "value"), model.buffers[name]
            block = Block.whole(buffer.shape)
            self._plain([Source(key, Frame.of(block, manifest.tensors[key].strides))], block, buffer)

    def losses(self) -> tuple[str, ...]:
        """Returns in words which of the checkpoint's precision is lost here."""
        return tuple(
            f"{kind} of {count} params was saved in {saved} and is rounded to {kept}"
            for (kind, saved, kept), count in self.rounded.items()
        )

    def _sources(self, member: ModelParam, saved: str, kind: str, section: str = "params") -> list[Source]:
        # A checkpoint of one part of a model holds what this rank has, whatever it is of the whole.
        is_of_part = "place" in self._manifest.params[saved]
        return sources_of(self._manifest, section, saved, kind, member.block if is_of_part else None)

    def _bring(self, sources: Sequence[Source], frame: Frame, start: int, stop: int, write: Write) -> None:
        """Plans elements ``[start, stop)`` of a frame, a chunk at a time; ``write`` counts from ``start``."""
        same = next((source.key for source in sources if _same(source.frame, frame)), None)
        if same is not None:
            self._write(same, start, stop, write)
            return
        assembly = Assembly(self._manifest, sources, frame)
        windows = list(assembly.windows(start, stop))

        def fill(checkpoint: Checkpoint) -> None:
            for first, last in windows:
                write(first - start, assembly.read(checkpoint, first, last))

        self.targets.append(Target(lambda: (chunk for window in windows for chunk in assembly.chunks(*window)), fill))

    def _write(self, key: Key, start: int, stop: int, write: Write) -> None:
        """Plans elements ``[start, stop)`` of a tensor, as they were saved."""

        def fill(checkpoint: Checkpoint) -> None:
            for chunk in chunks_of(key, checkpoint.manifest.tensors[key], start, stop):
                first, last = max(chunk.start, start), min(chunk.stop, stop)
                write(first - start, checkpoint.values(chunk)[first - chunk.start : last - chunk.start])

        self.targets.append(Target(lambda: needed_chunks(self._manifest, key, start, stop), fill))

    def _deliver(self, sources: Sequence[Source], block: Block, deliver: Callable[[torch.Tensor], object]) -> None:
        """Plans all elements of a block, as a contiguous tensor on the host."""
        shape = block.sizes
        frame = Frame.of(block, contiguous_strides(shape))
        assembly = Assembly(self._manifest, sources, frame)
        numel = frame.numel

        def fill(checkpoint: Checkpoint) -> None:
            deliver(assembly.read(checkpoint, 0, numel).view(shape))

        self.targets.append(Target(lambda: assembly.chunks(0, numel), fill))

    def _states(self, member: ModelParam, saved: str) -> None:
        keeps_average = member.optimizer is not None and self._model.engines[member.optimizer].rule.average is not None
        kinds = [kind for kind in self._manifest.kinds[saved] if kind != "param" and (kind != EMA or keeps_average)]
        margins = self._margins_of(member, saved)
        kinds = [kind for kind in kinds if kind not in margins]
        if member.entry is not None and member.shard is not None:
            for kind in margins:
                self._margin(saved, kind, self.margins[member.param])
            member.shard.ensure_states(kind for kind in kinds if kind != "master")
            for kind in kinds:
                format = "the param"  # a master that is not kept here
                if kind != "master" or member.shard.masters:
                    format = member.shard.format_of(kind).name
                    self._slice(member, saved, kind)
                self._note_loss(member, saved, kind, format)
        elif self._manifest.params[saved]["has_state"]:
            about = self._manifest.params[saved]
            state = ParamState(about["step"], self._manifest.carried(saved))
            self.waiting[member.param] = state
            for kind in margins:
                self._margin(saved, kind, state.margins)
            for kind in kinds:
                keep = partial(state.tensors.__setitem__, kind)
                self._deliver(self._sources(member, saved, kind), member.block, keep)

    def _margins_of(self, member: ModelParam, saved: str) -> list[str]:
        """Returns the states in the checkpoint that have a value for each row or column of the param."""
        assert member.optimizer is not None
        margins = self._model.engines[member.optimizer].rule.margins
        return [kind for kind in self._manifest.kinds[saved] if kind in margins]

    def _margin(self, saved: str, kind: str, into: dict[str, torch.Tensor]) -> None:
        key = Key("params", saved, kind)
        tensor = self._manifest.tensors[key]
        block = Block.whole(tensor.shape)
        self._deliver([Source(key, Frame.of(block, tensor.strides))], block, partial(into.__setitem__, kind))

    def _note_loss(self, member: ModelParam, saved: str, kind: str, format: str) -> None:
        """Notes what is rounded: other formats, and other blocks of 256 elements that share a scale."""
        sources, box = self._sources(member, saved, kind), (member.block.offsets, member.block.sizes)
        same = [source for source in sources if source.frame[:2] == box]  # of a cut param, other ranks have the others
        for source in same or sources:
            encoding = self._manifest.tensors[source.key].encoding or FP32.name
            is_cut_anew = not same and isinstance(FORMATS.get(encoding), BlockFormat)
            if format not in (FP32.name, encoding) or (is_cut_anew and format == encoding):
                told = f"{encoding}, in blocks of another cut," if is_cut_anew and format == encoding else encoding
                self.rounded[kind, told, format] += 1
                return

    def _slice(self, member: ModelParam, saved: str, kind: str, section: str = "params") -> None:
        """Plans the elements of a tensor that lie in this rank's shard."""
        shard = member.shard
        assert shard is not None
        where = shard.slice_of(member.index)
        write = shard_writer(shard, kind, where.local.start)
        if section == "gradients":
            assert member.entry is not None and member.entry.gradient_slice is not None
            write = writer_of(member.entry.gradient_slice.total)
        stop = where.start + where.local.stop - where.local.start
        frame = Frame.of(member.block, shard.strides(member.index))
        self._bring(self._sources(member, saved, kind, section), frame, where.start, stop, write)

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
            kept = member.entry.gradient_slice.total.dtype
            sources = self._sources(member, saved, "reduced", "gradients")
            self._slice(member, saved, "reduced", "gradients")
            about = self._manifest.info.get("gradients", {}).get(sources[0].key.name)
            if about is not None:  # norms are those of one block
                self.sums[member.param] = about if len(sources) == 1 else {**about, "norms": None}
            if self._manifest.tensors[sources[0].key].dtype.itemsize > kept.itemsize:
                self.rounded["gradient", FP32.name, format_of(kept, "a gradient").name] += 1
        own, saved_by = kinds - {"reduced"}, self._manifest.info["world"]
        if own and saved_by != self._world.size:
            raise CheckpointError(
                f"load this checkpoint at as many ranks, or save before no_sync(): {saved_by} ranks "
                f"accumulated gradients of {saved!r} under no_sync(), which {self._world.size} ranks cannot divide."
            )
        kind, param = str(self._world.rank), member.param
        key = Key("gradients", member.block.name_in(saved), kind)
        if kind in own and key not in self._manifest.tensors:
            raise CheckpointError(
                f"load this checkpoint in the cut that it was saved in, or save before no_sync(): rank {kind} "
                f"accumulated a gradient of another block of {saved!r} than it has here."
            )
        if kind in own:

            def deliver(whole: torch.Tensor) -> None:
                self.gradients[param] = whole.to(param.device)

            source = Source(key, Frame.of(member.block, self._manifest.tensors[key].strides))
            self._deliver([source], member.block, deliver)

    def _plain(self, sources: Sequence[Source], block: Block, to: torch.Tensor) -> None:
        """Plans all elements of a tensor that lies in memory of its own on this rank."""
        if is_dense(to):
            self._bring(sources, Frame.of(block, strides_of(to)), 0, block.numel, writer_of(flat_of(to)))
        else:
            self._deliver(sources, block, to.detach().copy_)


def _same(one: Frame, other: Frame) -> bool:
    """True if both number the same elements alike."""
    return one[:2] == other[:2] and same_order(one.sizes, one.strides, other.strides)
