"""Reads a folder that ``torch.distributed.checkpoint.save`` wrote, from FSDP2 or another library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from .from_torch import from_nested
from .source import LazyTensor
from .unpickle import read_index, read_item

if TYPE_CHECKING:
    from .from_torch import Hints
    from .source import Foreign, Hyper

INDEX = ".metadata"


def read_dcp(folder: Path, hints: Hints) -> Foreign:
    """
    Raises:
        CheckpointError: the folder is damaged, or the role of a tensor is not clear.
    """
    index = read_index(folder / INDEX)
    try:
        nested = _nested(folder, index)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            "load the checkpoint with the torch that wrote it and save it again: "
            f"{folder / INDEX} is not laid out as by torch 2.11 to 2.13 ({error!r}). Nothing was imported."
        ) from error
    return from_nested(nested, f"torch.distributed.checkpoint: {folder.name}", hints)


# Maps each item to its places in the folder, by the offset of its box in the tensor; None if it is not a tensor.
_Places = dict[str, dict[tuple[int, ...] | None, Any]]


def _item(folder: Path, places: _Places, name: str, offset: tuple[int, ...] | None) -> Any:
    place = places[name].get(offset)
    if place is None:
        raise CheckpointError(f"{folder} is damaged: its index has no place for {name!r} at {offset}.")
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"save it without compression: {folder} has {name!r} compressed.")
    path = folder / place.relative_path
    if path.resolve().parent != folder.resolve() or not path.is_file():
        raise CheckpointError(f"{path}, where {name!r} should be, is not a file of this folder. Nothing was imported.")
    return read_item(path, int(place.offset), int(place.length))


def _values(folder: Path, places: _Places, name: str, described: Any) -> LazyTensor:
    shape, dtype = tuple(described.size), described.properties.content[0]
    boxes = [(tuple(each.offsets), tuple(each.sizes)) for each in described.chunks]
    _check_boxes(folder, name, shape, boxes)

    def load() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for offsets, sizes in boxes:
            box = _item(folder, places, name, offsets)
            if not isinstance(box, torch.Tensor) or tuple(box.shape) != sizes or box.dtype is not dtype:
                raise CheckpointError(f"{folder}: {name!r} at {offsets} is not the tensor that the index says.")
            whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = box
        return whole

    return LazyTensor(shape, dtype, load)


def _check_boxes(
    folder: Path, name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Raises CheckpointError unless the boxes fill the tensor: inside of it, without overlap, as many elements."""
    inside = all(
        len(offsets) == len(sizes) == len(shape)
        and all(
            start >= 0 and size >= 0 and start + size <= all_of for start, size, all_of in zip(*box, shape, strict=True)
        )
        for box in boxes
        for offsets, sizes in (box,)
    )
    filled = [box for box in boxes if math.prod(box[1])]
    ordered = sorted(filled)
    # Sorted by first offset: only boxes whose ranges overlap in the first dimension can overlap.
    for at, (offsets, sizes) in enumerate(ordered):
        for others, their_sizes in ordered[at + 1 :]:
            if shape and others[0] >= offsets[0] + sizes[0]:
                break
            meets = all(a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, others, their_sizes, strict=True))
            inside = inside and not meets
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise CheckpointError(
            f"save the checkpoint again: the pieces of {name!r} in {folder} do not make up its shape "
            f"{list(shape)}: {boxes[:4]}. Nothing was imported."
        )


def _nested(folder: Path, index: Any) -> object:
    """Returns the dict that was saved, with a LazyTensor in place of each tensor."""
    places: _Places = {}
    for key, place in index.storage_data.items():
        offset = getattr(key, "offset", None)
        places.setdefault(key.fqn, {})[None if offset is None else tuple(offset)] = place
    root: dict[Any, Any] = {}
    for name, described in index.state_dict_metadata.items():
        path = (index.planner_data or {}).get(name, (name,))
        is_tensor = hasattr(described, "chunks")
        if not is_tensor and not _is_wanted(path):
            continue
        value = _values(folder, places, name, described) if is_tensor else _plain(_item(folder, places, name, None))
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return _unflattened(_with_lists(root))


def _is_wanted(path: tuple[object, ...]) -> bool:
    """True for groups of optimizers. Other values, such as a data loader's state, may be of any class: not read."""
    return any(str(key).partition(".")[0] in ("param_groups", "state") for key in path)


def _plain(value: object) -> object:
    return LazyTensor.of(value) if isinstance(value, torch.Tensor) else value


def _with_lists(value: object) -> Any:
    """Restores lists by the name ``param_groups`` from dicts with the keys 0, 1, ..."""
    if not isinstance(value, Mapping):
        return value
    found = {key: _with_lists(item) for key, item in value.items()}
    groups = found.get("param_groups")
    if isinstance(groups, Mapping) and all(isinstance(key, int) for key in groups):
        found["param_groups"] = [groups[key] for key in sorted(groups)]
        known = {str(key): key for group in found["param_groups"] for key in group.get("params", ())}
        # Keys of dicts were written as text; torch.optim's own are numbers.
        found["state"] = {known.get(key, key): state for key, state in found.get("state", {}).items()}
    return found


def _unflattened(value: object) -> object:
    """Brings optimizers saved as ``state.<param>.<kind>`` and ``param_groups.<param>.<key>`` to torch's own form."""
    if not isinstance(value, Mapping):
        return value
    flat = [key for key in value if isinstance(key, str) and key.startswith(("state.", "param_groups."))]
    if not any(key.startswith("param_groups.") for key in flat):
        return {key: _unflattened(item) for key, item in value.items()}
    state: dict[str, dict[str, object]] = {}
    hyper: dict[str, dict[str, object]] = {}
    for key in flat:
        section, _, rest = key.partition(".")
        param, _, kind = rest.rpartition(".")
        (state if section == "state" else hyper).setdefault(param, {})[kind] = value[key]
    rest_of_it = {key: item for key, item in value.items() if key not in flat}
    return {**rest_of_it, "optimizer": {"state": state, "param_groups": list(_regrouped(hyper))}}


def _regrouped(hyper: Mapping[str, Mapping[str, object]]) -> Iterator[Hyper]:
    """Makes one group of all params with equal hyper-parameters: the file does not list the groups."""
    groups: dict[str, dict[str, Any]] = {}
    for param, values in hyper.items():
        known = {key: value.item() if isinstance(value, LazyTensor) else value for key, value in values.items()}
        groups.setdefault(repr(sorted(known.items())), {**known, "params": []})["params"].append(param)
    yield from groups.values()
