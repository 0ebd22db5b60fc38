"""Exports a checkpoint to one file that other libraries read, a chunk at a time.

``safetensors``: the weights by name, in full precision (the fp32 master where there is one), and the buffers.
``torch``: the state dict of one optimizer, as ``torch.optim`` saves and loads it with ``weights_only=True``. If its
param groups take several rules, as those of ShardedMuon do, a dict of one state dict for each torch class, by its name.
"""

from __future__ import annotations

import inspect
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..domain.param_state import count_as_torch
from ..errors import CheckpointError
from ..rules.choice import KEY
from ..tensors.safetensors_format import bytes_of, header
from . import files, values
from .assemble import Assembly, source_of, sources_of
from .elements import contiguous_strides, host_chunks, reader_of
from .param_box import ParamBox, StridedBox
from .records import TensorKey
from .safetensors_file import SafetensorsWriter

if TYPE_CHECKING:
    from .inspect import Advance
    from .reader import Checkpoint
    from .records import GroupInfo, Manifest, TensorInfo


def export_weights(checkpoint: Checkpoint, target: Path, advance: Advance) -> None:
    """Writes one safetensors file; tied params once, under their first name."""
    manifest = checkpoint.manifest
    keys = [_weight(manifest, name) for name in manifest.params] + [key for key, _ in manifest.of("buffers")]
    keys.sort(key=lambda key: -_tensor(manifest, key).values_dtype.itemsize)
    described = [(key.name, (each := _tensor(manifest, key)).values_dtype, each.shape) for key in keys]
    head = header(described, {"format": "pt"})
    with new_file(target) as (_, file), SafetensorsWriter(file, head) as writer:
        for key in keys:
            writer.add(_chunks(checkpoint, key, advance))
        writer.finish()


def _weight(manifest: Manifest, name: str) -> TensorKey:
    return TensorKey("params", name, "master" if "master" in manifest.kinds[name] else "param")


def _tensor(manifest: Manifest, key: TensorKey) -> TensorInfo:
    """Returns shape and dtype of a tensor of the export; several tensors of the checkpoint may make it up."""
    return manifest.kinds[key.name][key.kind] if key.section == "params" else manifest.tensors[key]


def _chunks(checkpoint: Checkpoint, key: TensorKey, advance: Advance) -> Iterator[torch.Tensor]:
    """Yields elements in contiguous order. A tensor that was saved in another order is read into memory whole."""
    manifest, tensor = checkpoint.manifest, _tensor(checkpoint.manifest, key)
    sources = source_of(manifest, key) if key in manifest.tensors else sources_of(manifest, *key)
    strided = StridedBox.of(ParamBox.whole(tensor.shape), contiguous_strides(tensor.shape))
    for _, read in Assembly(manifest, sources, strided).values(checkpoint):
        # Decoded values may take more bytes than the saved ones, as those of split masters do.
        yield from host_chunks(reader_of(read), read.numel(), read.dtype)
        advance(read.numel() * tensor.dtype.itemsize)


def export_states(checkpoint: Checkpoint, target: Path, number: int, advance: Advance) -> None:
    """Writes the state dict of optimizer ``number``, with torch's keys of params: their position in the groups.

    If its groups take several rules, it writes ``{"Muon": state dict, "AdamW": state dict}``, each with the groups and
    params that a torch optimizer of the class would have, in their order.
    """
    manifest = checkpoint.manifest
    if not 0 <= number < len(manifest.optimizers):
        raise CheckpointError(
            f"give --optimizer below {len(manifest.optimizers)}: the checkpoint holds no optimizer {number}."
        )
    state_dict, contents = _state_dict(checkpoint, number)
    with new_file(target) as (made, descriptor), open(descriptor, "wb") as file:
        # torch writes its own format with holes for the elements; it reads no tensor.
        with torch.serialization.skip_data():
            torch.save(state_dict, made)
        offsets = _offsets(made)
        for storage, content in enumerate(contents):
            file.seek(offsets[storage])
            if isinstance(content, torch.Tensor):
                file.write(bytes_of(content.reshape(-1)))
                continue
            for chunk in _chunks(checkpoint, content, advance):
                file.write(bytes_of(chunk))
        file.flush()
        files.sync(file.fileno())


# The word by which a group names its rule -> the torch class, and whether that class counts steps.
_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], bool]] = {
    "muon": (torch.optim.Muon, False),
    "adamw": (torch.optim.AdamW, True),
}
_OURS = {KEY, "matrices"}  # keys of groups that no torch class reads


def _state_dict(checkpoint: Checkpoint, number: int) -> tuple[dict[str, Any], list[TensorKey | torch.Tensor]]:
    """Returns the dict with empty large tensors, and the content of each tensor in the order of the file."""
    optimizer, contents = checkpoint.manifest.optimizers[number], list[TensorKey | torch.Tensor]()

    def placed(tensor: torch.Tensor, content: TensorKey | None = None) -> torch.Tensor:
        contents.append(tensor if content is None else content)
        return tensor

    groups, counts = optimizer.groups, optimizer.counts_steps
    # A group that names no rule takes the optimizer's first one.
    word_of = [str(group.values.get(KEY, optimizer.rule)) for group in groups]
    words = dict.fromkeys(word_of)
    if len(words) == 1 or not words.keys() <= _CLASSES.keys():
        return _dict_of(checkpoint, groups, counts, placed), contents
    by_class = {}
    for word in words:
        made, class_counts = _CLASSES[word]
        own = [group for group, its in zip(groups, word_of, strict=True) if its == word]
        found = by_class[made.__name__] = _dict_of(checkpoint, own, counts and class_counts, placed)
        found["param_groups"] = [_of_class(made, group) for group in found["param_groups"]]
    return by_class, contents


def _dict_of(
    checkpoint: Checkpoint, saved: Sequence[GroupInfo], counts_steps: bool, placed: Callable[..., torch.Tensor]
) -> dict[str, Any]:
    """Returns the state dict of some groups of an optimizer.

    Args:
        placed: takes each tensor, and where its elements are if it is empty, in the order of the file.
    """
    manifest = checkpoint.manifest
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(name for group in saved for name in group.params):
        about = manifest.params[name]
        if not about.has_state:
            continue
        state = states[index] = {}
        if counts_steps:
            state["step"] = placed(count_as_torch(about.step))
        for scalar, value in about.carried.items():
            state[scalar] = placed(torch.tensor(value, dtype=torch.float64))
        for kind, tensor in manifest.kinds[name].items():
            if kind != "param":
                empty = torch.empty(tensor.shape, dtype=tensor.values_dtype)
                state[kind] = placed(empty, TensorKey("params", name, kind))
    groups, first = [], 0
    for group in saved:
        given = values.decode_dict(
            group.values, lambda name: placed(checkpoint.whole(TensorKey("extra", name, "value")))
        )
        groups.append({**given, "params": list(range(first, first + len(group.params)))})
        first += len(group.params)
    return {"state": states, "param_groups": groups}


def _of_class(made: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group without the keys of the other classes; the user's own keys stay."""
    all_keys = {each: set(inspect.signature(each).parameters) - {"params"} for each, _ in _CLASSES.values()}
    dropped = set().union(_OURS, *all_keys.values()) - all_keys[made]
    return {key: value for key, value in group.items() if key not in dropped}


def _offsets(path: Path) -> dict[int, int]:
    """Returns the offset of each storage in a file of torch's, which is an uncompressed zip file."""
    found = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for entry in archive.infolist():
            folder, _, number = entry.filename.rpartition("/")
            if folder.endswith("/data"):
                file.seek(entry.header_offset + 26)
                lengths = file.read(4)
                name_bytes, extra_bytes = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
                found[int(number)] = entry.header_offset + 30 + name_bytes + extra_bytes
    return found


@contextmanager
def new_file(target: Path) -> Iterator[tuple[Path, int]]:
    """Yields a new file beside ``target``, open for writing, which replaces ``target`` once it is whole."""
    made = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    try:
        yield made, files.create_in_place_of(target, made)
        files.rename(made, target)
    except BaseException:
        with suppress(OSError):
            files.remove(made)
        raise
