"""Exports a checkpoint to one file that other libraries read, a chunk at a time.

``safetensors``: the weights by name, in full precision (the fp32 master where there is one), and the buffers.
``torch``: the state dict of one optimizer, as ``torch.optim`` saves and loads it with ``weights_only=True``.
"""

from __future__ import annotations

import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..domain.param_state import count_as_torch
from ..errors import CheckpointError
from . import files, values
from .assemble import Assembly, source_of, sources_of
from .elements import contiguous_strides, host_chunks, reader_of
from .param_box import ParamBox, StridedBox
from .records import TensorKey
from .safetensors_file import SafetensorsWriter, bytes_of, header

if TYPE_CHECKING:
    from .inspect import Advance
    from .reader import Checkpoint
    from .records import Manifest, TensorInfo


def export_weights(checkpoint: Checkpoint, target: Path, advance: Advance) -> None:
    """Writes one safetensors file; tied params once, under their first name."""
    manifest = checkpoint.manifest
    keys = [_weight(manifest, name) for name in manifest.params] + [key for key, _ in manifest.of("buffers")]
    keys.sort(key=lambda key: -_tensor(manifest, key).values_dtype.itemsize)
    described = [(key.name, (each := _tensor(manifest, key)).values_dtype, each.shape) for key in keys]
    head = header(described, {"format": "pt"})
    with _new(target) as (_, file), SafetensorsWriter(file, head) as writer:
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
    """Writes the state dict of optimizer ``number``, with torch's keys of params: their position in the groups."""
    manifest = checkpoint.manifest
    if not 0 <= number < len(manifest.optimizers):
        raise CheckpointError(
            f"give --optimizer below {len(manifest.optimizers)}: the checkpoint holds no optimizer {number}."
        )
    state_dict, contents = _state_dict(checkpoint, number)
    with _new(target) as (made, descriptor), open(descriptor, "wb") as file:
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


def _state_dict(checkpoint: Checkpoint, number: int) -> tuple[dict[str, Any], list[TensorKey | torch.Tensor]]:
    """Returns the dict with empty large tensors, and the content of each tensor in the order of the file."""
    manifest, optimizer = checkpoint.manifest, checkpoint.manifest.optimizers[number]
    contents: list[TensorKey | torch.Tensor] = []

    def placed(tensor: torch.Tensor, content: TensorKey | None = None) -> torch.Tensor:
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
                state[kind] = placed(empty, TensorKey("params", name, kind))
    groups, index = [], 0
    for group in optimizer["groups"]:
        given = values.decode(group["values"], lambda name: placed(checkpoint.whole(TensorKey("extra", name, "value"))))
        groups.append({**given, "params": list(range(index, index + len(group["params"])))})
        index += len(group["params"])
    return {"state": states, "param_groups": groups}, contents


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
