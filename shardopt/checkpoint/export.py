"""Writes a checkpoint in a form that others read: one file, streamed a chunk at a time.

``safetensors``: the weights by name, in full precision (the fp32 master where there is one), and the buffers.
``torch``: the state dict of one optimizer, as ``torch.optim`` saves and loads it with ``weights_only=True``.
"""

from __future__ import annotations

import secrets
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..domain.param_state import count_as_torch
from ..errors import CheckpointError
from . import files, values
from .assemble import Assembly, source_of, sources_of
from .block import Block, Frame
from .elements import chunks_of, contiguous_strides, reader_of
from .records import Key
from .tensor_file import Writer, bytes_of, header

if TYPE_CHECKING:
    from .reader import Checkpoint
    from .records import Manifest, Tensor

Advance = Callable[[int], None]


def export_weights(checkpoint: Checkpoint, target: Path, advance: Advance) -> None:
    """Writes one safetensors file; tied params once, under their first name."""
    manifest = checkpoint.manifest
    keys = [_weight(manifest, name) for name in manifest.params] + [key for key, _ in manifest.of("buffers")]
    keys.sort(key=lambda key: -_tensor(manifest, key).values_dtype.itemsize)
    described = [(key.name, (each := _tensor(manifest, key)).values_dtype, each.shape) for key in keys]
    head = header(described, {"format": "pt"})
    with _new(target) as (_, file):
        writer = Writer(file, head)
        try:
            for key in keys:
                writer.add(_chunks(checkpoint, key, advance))
            writer.finish()
        finally:
            writer.close()


def _weight(manifest: Manifest, name: str) -> Key:
    return Key("params", name, "master" if "master" in manifest.kinds[name] else "param")


def _tensor(manifest: Manifest, key: Key) -> Tensor:
    """Returns what a tensor of the export is; several of the checkpoint may make it up."""
    return manifest.kinds[key.name][key.kind] if key.section == "params" else manifest.tensors[key]


def _chunks(checkpoint: Checkpoint, key: Key, advance: Advance) -> Iterator[torch.Tensor]:
    """Yields elements in contiguous order; a tensor that was saved in another order passes through memory whole."""
    manifest, tensor = checkpoint.manifest, _tensor(checkpoint.manifest, key)
    sources = source_of(manifest, key) if key in manifest.tensors else sources_of(manifest, *key)
    frame = Frame.of(Block.whole(tensor.shape), contiguous_strides(tensor.shape))
    for _, read in Assembly(manifest, sources, frame).values(checkpoint):
        # Values may take more bytes than what was saved of them: those of split masters do.
        yield from chunks_of(reader_of(read), read.numel(), read.dtype)
        advance(read.numel() * tensor.dtype.itemsize)


def export_states(checkpoint: Checkpoint, target: Path, number: int, advance: Advance) -> None:
    """Writes the state dict of optimizer ``number``, with torch's keys of params: their position in the groups."""
    manifest = checkpoint.manifest
    if not 0 <= number < len(manifest.optimizers):
        raise CheckpointError(f"there is no optimizer {number}: the checkpoint holds {len(manifest.optimizers)}.")
    state_dict, contents = _state_dict(checkpoint, number)
    with _new(target) as (made, descriptor), open(descriptor, "wb") as file:
        # Torch writes its own format with holes for the elements, and reads no tensor for that.
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


def _state_dict(checkpoint: Checkpoint, number: int) -> tuple[dict[str, Any], list[Key | torch.Tensor]]:
    """Returns the dict, its large tensors without values; and the contents of its tensors in the order of the file."""
    manifest, optimizer = checkpoint.manifest, checkpoint.manifest.optimizers[number]
    contents: list[Key | torch.Tensor] = []

    def placed(tensor: torch.Tensor, content: Key | None = None) -> torch.Tensor:
        contents.append(tensor if content is None else content)
        return tensor

    names = [name for group in optimizer["groups"] for name in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(names):
        about = manifest.params[name]
        if not about["has_state"]:
            continue
        state = states[index] = {}
        if optimizer["counts_steps"]:
            state["step"] = placed(count_as_torch(about["step"]))
        for scalar, value in manifest.carried(name).items():
            state[scalar] = placed(torch.tensor(value, dtype=torch.float64))
        for kind, tensor in manifest.kinds[name].items():
            if kind != "param":
                empty = torch.empty(tensor.shape, dtype=tensor.values_dtype)
                state[kind] = placed(empty, Key("params", name, kind))
    groups, index = [], 0
    for group in optimizer["groups"]:
        given = values.decode(group["values"], lambda name: placed(checkpoint.whole(Key("extra", name, "value"))))
        groups.append({**given, "params": list(range(index, index + len(group["params"])))})
        index += len(group["params"])
    return {"state": states, "param_groups": groups}, contents


def _offsets(path: Path) -> dict[int, int]:
    """Returns where the bytes of each storage begin in a file of torch's: a zip file that compresses nothing."""
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
def _new(target: Path) -> Iterator[tuple[Path, int]]:
    """Yields a new file beside ``target``, open for writing, which replaces ``target`` once it is whole."""
    made = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    try:
        yield made, files.create_in_place_of(target, made)
        files.rename(made, target)
    except BaseException:
        with suppress(OSError):
            files.remove(made)
        raise
