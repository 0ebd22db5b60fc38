"""Reads a folder that DeepSpeed's ``save_checkpoint`` wrote at ZeRO stage 1, 2 or 3, at any number of ranks.

Each rank's file holds flat fp32 vectors: the masters, and one vector for each state. The place of a param in them
depends on the stage::

    1, 2    one vector a group, cut evenly:       rank 0 [ a a a a b b ]   rank 1 [ b b b c c . ]
    3       every param cut evenly, ranks alike:  rank 0 [ a a b b b c ]   rank 1 [ a a b b . c ]

A dot is padding. Stage 3 also cuts its vectors between params, into sub-groups.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from .source import Foreign, ForeignParam, Hyper, LazyTensor, picked
from .unpickle import Inert, read_file

_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
LATEST = "latest"


def find_tag(folder: Path) -> Path | None:
    """Returns the folder with the ranks' files: this one, or the one in its ``latest``; None if there is neither."""
    for each in (folder, *_named_by(folder / LATEST)):
        if each.is_dir() and any(_OPTIM.fullmatch(path.name) for path in each.iterdir()):
            return each
    return None


def _named_by(pointer: Path) -> list[Path]:
    if not pointer.is_file() or pointer.stat().st_size > 4096:
        return []
    name = pointer.read_text(errors="replace").strip()
    return [pointer.parent / name] if name and Path(name).name == name else []


def read_deepspeed(folder: Path) -> Foreign:
    """
    Raises:
        CheckpointError: files are missing or damaged, or hold what cannot be read (model parallelism, experts).
    """
    tag = find_tag(folder)
    if tag is None:
        raise CheckpointError(
            "give the folder that DeepSpeed's save_checkpoint() was given, or one tag in it: neither "
            f"{folder} nor the folder that its {LATEST!r} names has files *zero_pp_rank_*_optim_states.pt."
        )
    try:
        return _ZeroFiles(tag).foreign()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            "load it with the DeepSpeed that wrote it, and save it again without options for checkpoints: "
            f"{tag} is not laid out as by DeepSpeed 0.19 ({type(error).__name__}: {error}). Nothing was imported."
        ) from error


@dataclass(frozen=True)
class _FlatSlice:
    """Elements ``[start, stop)`` of one rank's flat vector ``index``."""

    rank: int
    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class _FlatParam:
    """One param: its shape, and the slices that make it up, in order."""

    shape: tuple[int, ...]
    slices: Sequence[_FlatSlice]


Shapes = Mapping[str, Sequence[int]]  # by name of a param


@dataclass(frozen=True)
class _RankFile:
    """One rank's file, as far as it is read; ``ds_config``: of the whole run."""

    optimizer_state_dict: Mapping[str, Any]
    ds_config: object = None


@dataclass(frozen=True)
class _RankStates:
    """What ``optimizer_state_dict`` of a rank's file holds: stage 3 and the others have different names."""

    partition_count: int | list[int]
    zero_stage: Inert | int = 1  # older versions' bf16 optimizer, which is stage 1, writes none
    optimizer_state_dict: object = None
    base_optimizer_state: object = None
    fp32_flat_groups: Sequence[torch.Tensor] = ()
    single_partition_of_fp32_groups: Sequence[torch.Tensor] = ()
    param_alignment_paddings: Sequence[Sequence[int]] | None = None
    param_slice_mappings: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class _Base:
    """What the wrapped optimizer's own dict holds; ``state``: by number of a flat vector."""

    param_groups: Sequence[Hyper]
    state: Mapping[int, Hyper]


@dataclass(frozen=True)
class _ModelFile:
    """A file of weights."""

    module: Mapping[str, torch.Tensor]
    param_shapes: Sequence[Shapes]
    buffer_names: Sequence[str]
    shared_params: Mapping[str, str] | None = None
    frozen_param_shapes: Shapes | None = None
    frozen_param_fragments: Mapping[str, torch.Tensor] | None = None


class _ZeroFiles:
    """Reads the files of all ranks, and finds each param in them."""

    def __init__(self, tag: Path):
        self.tag = tag
        files = self._files()
        self.world = len(files)
        saved = [picked(_RankFile, read_file(path)) for path in files]
        self.config = saved[0].ds_config
        self.optims = [picked(_RankStates, each.optimizer_state_dict) for each in saved]
        self.stage = _stage(self.optims[0])
        count = self.optims[0].partition_count
        if (max(count) if isinstance(count, list) else count) != self.world:
            raise self._missing(f"{count} ranks wrote it, the files of {self.world} are there")
        names = (
            [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(self.world)]
            if self.stage == 3
            else ["mp_rank_00_model_states.pt"]
        )
        absent = [name for name in names if not (tag / name).is_file()]
        if absent:
            raise self._missing(f"{absent[0]} is not there")
        self.models = [picked(_ModelFile, read_file(tag / name)) for name in names]
        is_3 = self.stage == 3
        bases = [each.optimizer_state_dict if is_3 else each.base_optimizer_state for each in self.optims]
        if None in bases:
            raise KeyError("optimizer_state_dict" if is_3 else "base_optimizer_state")
        if not all(isinstance(each, Mapping) for each in bases):
            raise CheckpointError(
                f"save it with 'elastic_checkpoint': false: {tag} was saved without param groups. Nothing was imported."
            )
        self.bases = [picked(_Base, each) for each in bases if isinstance(each, Mapping)]
        self.masters = [each.fp32_flat_groups if is_3 else each.single_partition_of_fp32_groups for each in self.optims]

    def _files(self) -> list[Path]:
        found: dict[int, Path] = {}
        for path in self.tag.iterdir():
            match = _OPTIM.fullmatch(path.name)
            parallel = match is not None and int(match[3]) > 0
            if parallel or re.match(r"layer_\d+|expp_rank_", path.name):
                raise CheckpointError(
                    f"consolidate it with DeepSpeed: {path.name} says that the model itself was split (tensor, "
                    "pipeline or expert parallelism). Nothing was imported."
                )
            if match is not None and found.setdefault(int(match[2]), path) != path:
                raise CheckpointError(
                    f"move one of two checkpoints out of {self.tag}: {path.name} and {found[int(match[2])].name} are "
                    "of one rank. Nothing was imported."
                )
        if sorted(found) != list(range(len(found))):
            raise self._missing(f"there are those of ranks {sorted(found)}")
        return [found[rank] for rank in range(len(found))]

    def _missing(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"copy the files of all ranks into one folder: {self.tag} lacks files: {what}. Nothing was imported."
        )

    # -- what is where ---------------------------------------------------------------------------------------------

    def foreign(self) -> Foreign:
        model = self.models[0]
        module, shared = model.module, dict(model.shared_params or {})
        places = self._places_of_stage_3() if self.stage == 3 else self._places_of_stage_1()
        groups, params = [], {}
        saved_groups = self.bases[0].param_groups
        names_of = self._names(places, saved_groups)
        for group, names in zip(saved_groups, names_of, strict=True):
            hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append((names, self._hyper(hyper)))
            for name in names:
                aliases = tuple(alias for alias, owner in shared.items() if owner == name)
                params[name] = self._param(name, places[name], module[name], aliases, group)
        buffers = {name: LazyTensor.of(module[name]) for name in model.buffer_names if name in module}
        known = {*params, *buffers, *shared}
        for name, frozen in self._frozen(module, known).items():
            aliases = tuple(alias for alias, owner in shared.items() if owner == name)
            params[name] = ForeignParam(frozen, aliases)
        return Foreign(f"DeepSpeed stage {self.stage}, {self.world} ranks: {self.tag.name}", params, buffers, groups)

    def _places_of_stage_1(self) -> dict[str, _FlatParam]:
        paddings = self.optims[0].param_alignment_paddings
        places = {}
        for index, shapes in enumerate(self.models[0].param_shapes):
            size = self.masters[0][index].numel()  # padding is cut off at the last rank only
            start = 0
            for number, (name, shape) in enumerate(shapes.items()):
                stop, slices = start + math.prod(shape), []
                at = start
                while at < stop:
                    rank = at // size
                    end = min(stop, (rank + 1) * size)
                    slices.append(_FlatSlice(rank, index, at - rank * size, end - rank * size))
                    at = end
                self._check_slices(name, index, slices)
                places[name] = _FlatParam(tuple(shape), slices)
                start = stop + (paddings[index][number] if paddings else 0)
        return places

    def _check_slices(self, name: str, index: int, slices: Sequence[_FlatSlice]) -> None:
        """Compares the slices with the tables that newer versions of DeepSpeed write."""
        for rank, optim in enumerate(self.optims):
            tables = optim.param_slice_mappings
            if not tables:
                continue
            listed = tables[index].get(name)
            own = next(((each.start, each.stop - each.start) for each in slices if each.rank == rank), None)
            if (None if listed is None else (listed.start, listed.numel)) != own:
                raise CheckpointError(
                    f"please report it with DeepSpeed's version: rank {rank}'s own table in {self.tag} places {name!r} "
                    "elsewhere than its group's order. Nothing was imported."
                )

    def _places_of_stage_3(self) -> dict[str, _FlatParam]:
        shapes = [item for group in self.models[0].param_shapes for item in group.items()]
        places = {}
        index = start = 0
        for name, shape in shapes:
            numel = math.prod(shape)
            own = -(-numel // self.world)
            while own and start == self.masters[0][index].numel():
                index, start = index + 1, 0
            slices = [
                _FlatSlice(rank, index, start, start + min(own, numel - rank * own))
                for rank in range(self.world)
                if rank * own < numel
            ]
            places[name] = _FlatParam(tuple(shape), slices)
            start += own
            if own and start > self.masters[0][index].numel():
                raise CheckpointError(f"{self.tag}: {name!r} does not end with its sub-group: nothing was imported.")
        return places

    def _names(self, places: Mapping[str, _FlatParam], groups: Sequence[Hyper]) -> list[tuple[str, ...]]:
        """Returns the names of each group's params: those in its flat vectors."""
        found: list[tuple[str, ...]] = []
        for group in groups:
            indices = set(group["params"])
            found.append(
                tuple(name for name, each in places.items() if each.slices and each.slices[0].index in indices)
            )
        if sum(map(len, found)) != len(places):
            raise CheckpointError(f"{self.tag}: its param groups do not list all flat vectors: nothing was imported.")
        return found

    # -- values ----------------------------------------------------------------------------------------------------

    def _param(
        self,
        name: str,
        place: _FlatParam,
        low: torch.Tensor,
        aliases: tuple[str, ...],
        group: Hyper,
    ) -> ForeignParam:
        shape, slices = place.shape, place.slices
        index = slices[0].index
        master = self._cut(name, shape, slices, [each[index] for each in self.masters])
        values = LazyTensor.of(low) if tuple(low.shape) == shape else master.as_dtype(low.dtype)
        own = [base.state.get(index, {}) for base in self.bases]
        state: dict[str, LazyTensor | float] = {}
        for key, value in own[0].items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = self._cut(f"{key} of {name}", shape, slices, [each[key] for each in own])
            else:
                state[key] = float(value) if isinstance(value, torch.Tensor) else value
        if state and "step" not in state and "step" in group:
            state["step"] = group["step"]  # apex and older versions count for the group
        if low.dtype is not torch.float32 and state:
            state["master"] = master
        return ForeignParam(values, aliases, state)

    def _cut(
        self, what: str, shape: tuple[int, ...], slices: Sequence[_FlatSlice], flats: Sequence[torch.Tensor]
    ) -> LazyTensor:
        """Returns the tensor that slices of the ranks' flat vectors make up."""
        for each in slices:
            if flats[each.rank].dim() != 1 or each.stop > flats[each.rank].numel():
                raise CheckpointError(
                    f"{self.tag} is damaged or of another model: rank {each.rank} holds {flats[each.rank].numel()} "
                    f"elements where {what} wants [{each.start}:{each.stop}]. Nothing was imported."
                )

        def load() -> torch.Tensor:
            return torch.cat([flats[each.rank][each.start : each.stop] for each in slices]).view(shape)

        return LazyTensor(shape, flats[0].dtype, load)

    def _frozen(self, module: Mapping[str, torch.Tensor], known: set[str]) -> dict[str, LazyTensor]:
        """Returns params of no group. At stage 3 the files list their shapes; other names belong to tied params."""
        if self.stage < 3:
            return {name: LazyTensor.of(tensor) for name, tensor in module.items() if name not in known}
        found = {}
        for name, shape in (self.models[0].frozen_param_shapes or {}).items():
            flats = [(model.frozen_param_fragments or {})[name].reshape(-1) for model in self.models]
            own = -(-math.prod(shape) // self.world)
            ends = [min(own, max(math.prod(shape) - rank * own, 0)) for rank in range(self.world)]
            slices = [_FlatSlice(rank, 0, 0, end) for rank, end in enumerate(ends)]
            found[name] = self._cut(name, tuple(shape), slices, flats)
        return found

    def _hyper(self, group: Hyper) -> dict[str, Any]:
        """Returns hyper-parameters by torch's names. DeepSpeed's own Adams keep some of them in the config."""
        hyper = {key: value for key, value in group.items() if key != "step"}
        if "bias_correction" in hyper:
            if not hyper.pop("bias_correction"):
                raise CheckpointError(
                    f"{self.tag} is of an Adam without bias correction, which shardopt's rule has: training would take "
                    "other steps. Nothing was imported."
                )
            hyper.setdefault("amsgrad", False)
            section = (self.config or {}).get("optimizer") if isinstance(self.config, Mapping) else None
            kind = str(section.get("type", "")).lower() if isinstance(section, Mapping) else ""
            if isinstance(section, Mapping) and kind in ("adam", "adamw"):
                decoupled = kind == "adamw" or bool((section.get("params") or {}).get("adam_w_mode", True))
                hyper.setdefault("decoupled_weight_decay", decoupled)
        return hyper


def _stage(optim: _RankStates) -> int:
    saved = optim.zero_stage
    stage = int(saved.arguments[0]) if isinstance(saved, Inert) else int(saved)
    if stage not in (1, 2, 3):
        raise CheckpointError(f"a ZeRO stage {stage} is not known: nothing was imported.")
    return stage
