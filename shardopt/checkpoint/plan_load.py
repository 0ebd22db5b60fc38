"""Plans a load: which elements of the checkpoint this rank reads, and where they go."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..domain.param_state import ParamState
from ..domain.residual import residual_of
from ..errors import CheckpointError
from ..kernels.formats import FORMATS, FP32, BlockFormat, format_of
from ..rules.rule import EMA
from . import gradients
from .assemble import Assembly, source_of, sources_of
from .elements import flat_of, has_flat_view, shard_writer, strides_of, writer_of
from .param_box import ParamBox, StridedBox
from .records import TensorKey

if TYPE_CHECKING:
    from .assemble import Sources
    from .collectives import AnyRanks
    from .elements import Write
    from .match import ModelMatch
    from .model import Model
    from .model_param import ModelParam
    from .records import GradientInfo, Manifest


@dataclass(frozen=True)
class ReadItem:
    """Elements that this rank reads, and the call that takes them."""

    assembly: Assembly
    write: Write


class LoadPlan:
    """What one rank reads of a checkpoint. Making the plan allocates missing states and changes no value.

    Attributes:
        items: what is read, in this order.
        gradients: this rank's own gradients, which were not reduced; ``items`` fill them.
        sums: what was saved about reduced gradients, whose sums ``items`` fill.
        margins: by bound param, its margins, whole; ``items`` fill them.
        waiting: states of params that no optimizer has bound, whole, on the host; ``items`` fill them.
        rounded: (kind, format in the file, shorter format here) -> number of params.
    """

    def __init__(self, manifest: Manifest, model: Model, match: ModelMatch, world: AnyRanks):
        """
        Args:
            world: all ranks that load.

        Raises:
            CheckpointError: there is no memory to load into.
        """
        self.items: list[ReadItem] = []
        self.gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.sums: dict[torch.nn.Parameter, GradientInfo] = {}
        self.margins: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        self.waiting: dict[torch.nn.Parameter, ParamState] = {}
        self.rounded: Counter[tuple[str, str, str]] = Counter()
        self._manifest, self._model, self._world = manifest, model, world
        self._accumulated: dict[str, set[str]] = defaultdict(set)
        for key, _ in manifest.of("gradients"):
            self._accumulated[manifest.param_of[key.name]].add(key.kind)
        for name, saved in match.params.items():
            member = model.params[name]
            if member.param.is_meta:
                raise CheckpointError(
                    f"give the optimizer of {name!r} too, or call module.to_empty(device=...) first: the param is on "
                    "the meta device and has no memory to load into."
                )
            if member.shard is None or member.shard.gathered is None:
                self._plain(self._sources(member, saved, "param"), member.box, member.param)
                if member.shard is not None and member.shard.exact != "param":
                    self._slice(member, saved, "param")
            else:
                self._slice(member, saved, "param")
            if name in match.states:
                self._states(member, saved)
            self._gradients(member, saved)
        for name in match.buffers:
            source, buffer = source_of(manifest, TensorKey("buffers", name, "value")), model.buffers[name]
            self._plain(source, ParamBox.whole(buffer.shape), buffer)

    def losses(self) -> tuple[str, ...]:
        """Returns in words which precision of the checkpoint is lost here."""
        return tuple(
            f"{kind} of {count} params was saved in {saved} and is rounded to {kept}"
            for (kind, saved, kept), count in self.rounded.items()
        )

    def _sources(self, member: ModelParam, saved: str, kind: str, section: str = "params") -> Sources:
        # A checkpoint of one part of a model holds the box of this rank, and does not say which box that is.
        is_of_part = self._manifest.params[saved].place is not None
        return sources_of(self._manifest, section, saved, kind, member.box if is_of_part else None)

    def _read(self, sources: Sources, strided: StridedBox, start: int, stop: int, write: Write) -> None:
        """Plans to read elements ``[start, stop)`` of a box; ``write`` counts from ``start``."""
        self.items.append(ReadItem(Assembly(self._manifest, sources, strided, start, stop), write))

    def _whole(self, sources: Sources, box: ParamBox, device: torch.device | str = "cpu") -> torch.Tensor:
        """Plans to read all elements of a box. Returns the new contiguous tensor that they will fill."""
        dtype = self._manifest.tensors[next(iter(sources))].values_dtype
        whole = torch.empty(box.sizes, dtype=dtype, device=device)
        self._plain(sources, box, whole)
        return whole

    def _states(self, member: ModelParam, saved: str) -> None:
        keeps_average = member.optimizer is not None and self._model.engines[member.optimizer].rule.average is not None
        kinds = [kind for kind in self._manifest.kinds[saved] if kind != "param" and (kind != EMA or keeps_average)]
        margins = self._margins(member, saved)
        kinds = [kind for kind in kinds if kind not in margins]
        if member.entry is not None and member.shard is not None:
            self.margins[member.param].update(margins)
            member.shard.ensure_states(kind for kind in kinds if kind != "master")
            for kind in kinds:
                format = "the param"  # no master is kept here
                if kind != "master" or member.shard.masters:
                    format = member.shard.format_of(kind).name
                    self._slice(member, saved, kind)
                self._note_loss(member, saved, kind, format)
        elif (about := self._manifest.params[saved]).has_state:
            state = ParamState(about.step, about.carried)
            self.waiting[member.param] = state
            state.margins.update(margins)
            state.tensors.update({kind: self._whole(self._sources(member, saved, kind), member.box) for kind in kinds})

    def _margins(self, member: ModelParam, saved: str) -> dict[str, torch.Tensor]:
        """Plans to read the states with a value for each row or column. Returns the tensors that they will fill."""
        assert member.optimizer is not None
        margins, tensors = self._model.engines[member.optimizer].rule.margins, self._manifest.tensors
        keys = {kind: TensorKey("params", saved, kind) for kind in self._manifest.kinds[saved] if kind in margins}
        sources = {kind: (source_of(self._manifest, key), tensors[key].shape) for kind, key in keys.items()}
        return {kind: self._whole(source, ParamBox.whole(shape)) for kind, (source, shape) in sources.items()}

    def _note_loss(self, member: ModelParam, saved: str, kind: str, format: str) -> None:
        """Notes what is rounded: other formats, and other blocks of 256 elements that share a scale."""
        sources, own = self._sources(member, saved, kind), (member.box.offsets, member.box.sizes)
        same = [key for key, strided in sources.items() if strided[:2] == own]  # other ranks hold the other boxes
        for key in same or sources:
            encoding = self._manifest.tensors[key].encoding or FP32.name
            is_cut_anew = not same and isinstance(FORMATS.get(encoding), BlockFormat)
            if format not in (FP32.name, encoding) or (is_cut_anew and format == encoding):
                described = f"{encoding}, in blocks of another cut," if is_cut_anew and format == encoding else encoding
                self.rounded[kind, described, format] += 1
                return

    def _slice(self, member: ModelParam, saved: str, kind: str, section: str = "params") -> None:
        """Plans to read the elements of a tensor that lie in this rank's shard."""
        shard = member.shard
        assert shard is not None
        where = shard.slice_of(member.index)
        write = shard_writer(shard, shard.exact if kind == "param" else kind, where.local.start)
        if section == "gradients":
            assert member.entry is not None and member.entry.gradient_slice is not None
            write = writer_of(member.entry.gradient_slice.total)
        stop = where.start + where.local.stop - where.local.start
        strided = StridedBox.of(member.box, shard.strides(member.index))
        self._read(self._sources(member, saved, kind, section), strided, where.start, stop, write)

    def _gradients(self, member: ModelParam, saved: str) -> None:
        """Plans to read the gradients that were accumulated since the last step."""
        kinds = set(self._accumulated[saved])
        if "residual" in kinds:
            kinds.remove("residual")
            self._residual(member, saved)
        if not kinds:
            return
        gradient_slice = None if member.entry is None else member.entry.gradient_slice
        if gradient_slice is None and ("reduced" in kinds or not gradients.accumulates_alone(member.domain)):
            raise CheckpointError(
                "hand the module over (ShardedAdamW(module, ...)), without release_gradients, as when it was saved: "
                f"the checkpoint's accumulated gradients of {saved!r} would be lost."
            )
        if "reduced" in kinds:
            assert gradient_slice is not None
            kept = gradient_slice.total.dtype
            sources = self._sources(member, saved, "reduced", "gradients")
            self._slice(member, saved, "reduced", "gradients")
            first = next(iter(sources))
            about = (self._manifest.info.gradients or {}).get(first.name)
            if about is not None:  # norms are those of one box
                self.sums[member.param] = about if len(sources) == 1 else replace(about, norms=None)
            if self._manifest.tensors[first].dtype.itemsize > kept.itemsize:
                self.rounded["gradient", FP32.name, format_of(kept, "a gradient").name] += 1
        own, saved_by = kinds - {"reduced"}, self._manifest.info.world
        if own and saved_by != self._world.size:
            raise CheckpointError(
                f"load this checkpoint at as many ranks, or save before no_sync(): {saved_by} ranks "
                f"accumulated gradients of {saved!r} under no_sync(), which {self._world.size} ranks cannot divide."
            )
        kind = str(self._world.rank)
        key = TensorKey("gradients", member.box.name_in(saved), kind)
        if kind in own and key not in self._manifest.tensors:
            raise CheckpointError(
                f"load this checkpoint with the mesh that saved it, or save before no_sync(): rank {kind} accumulated "
                f"a gradient of another box of {saved!r} than it holds here, which would be lost."
            )
        if kind in own:
            source = {key: StridedBox.of(member.box, self._manifest.tensors[key].strides)}
            self.gradients[member.param] = self._whole(source, member.box, member.param.device)

    def _residual(self, member: ModelParam, saved: str) -> None:
        """Plans to read this rank's part of what quantized gradients owe; notes a loss if nothing is kept here."""
        found = residual_of(member.domain, member.entry)
        if found is None:
            self.rounded["what quantized gradients owe", FP32.name, "nothing"] += 1
            return
        assert member.shard is not None
        start, values = found
        strided = StridedBox.of(member.box, member.shard.strides(member.index))
        sources = self._sources(member, saved, "residual", "gradients")
        self._read(sources, strided, start, start + values.numel(), writer_of(values))

    def _plain(self, sources: Sources, box: ParamBox, to: torch.Tensor) -> None:
        """Plans to read all elements of a tensor that has its own memory on this rank."""
        strided = StridedBox.of(box, strides_of(to))
        self._read(
            sources, strided, 0, box.numel, writer_of(flat_of(to)) if has_flat_view(to) else _box_writer(to, strided)
        )


def _box_writer(to: torch.Tensor, strided: StridedBox) -> Write:
    """Writes elements of a tensor with gaps, which has no 1D view of all elements."""

    def write(start: int, values: torch.Tensor) -> None:
        for low, high in strided.corners(start, start + values.numel()):
            spans = zip(strided.offsets, low, high, strict=True)
            box = to.detach()[tuple(slice(first - offset, last - offset) for offset, first, last in spans)]
            box.copy_(strided.view(values, start, (low, high)))

    return write
