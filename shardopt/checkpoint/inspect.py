"""Describes a checkpoint, and verifies that every byte is as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import CheckpointError
from ..tensors.safetensors_format import NAME_OF_DTYPE
from . import values
from .publish import find
from .reader import Checkpoint, file_chunks
from .records import SECTIONS

if TYPE_CHECKING:
    from .records import GroupInfo, Manifest, TensorInfo, TensorKey
    from .typed_json import Json

Advance = Callable[[int], None]  # takes the number of bytes that were processed
_COLUMNS = ("name", "kind", "shape", "dtype", "step", "size", "ranges")


def describe(directory: Path) -> Iterator[str]:
    """Yields lines: what was saved, by whom, and a table of all tensors."""
    path = find(directory)
    with Checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
    info = manifest.info
    total = sum(file.nbytes for file in manifest.files.values())
    yield f"{path}"
    yield (
        f"step {info.step}, written by {info.world} rank(s) with shardopt {info.shardopt}, "
        f"torch {info.torch}: {len(manifest.files)} file(s), {size(total)}"
    )
    if info.imported is not None:
        yield f"imported from {info.imported}"
    for number, optimizer in enumerate(manifest.optimizers):
        yield f"optimizer {number}: {optimizer.rule}"
        for index, group in enumerate(optimizer.groups):
            hyper = ", ".join(f"{key}={value}" for key, value in _decoded(group).items() if value is not None)
            yield f"  group {index}: {len(group.params)} param(s), {hyper}"
    if info.extra:
        yield f"extra: {', '.join(info.extra)}"
    yield ""
    yield from _table(_COLUMNS, (_row(manifest, key, tensor) for key, tensor in _in_order(manifest)))


def as_data(directory: Path) -> dict[str, Any]:
    """Returns what :func:`describe` yields, as numbers, texts, lists and dicts."""
    path = find(directory)
    with Checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
    info = manifest.info
    return {
        "path": str(path),
        **{name: getattr(info, name) for name in ("step", "world", "shardopt", "torch", "imported")},
        "extra": list(info.extra),
        "files": {name: file.nbytes for name, file in manifest.files.items()},
        "optimizers": [
            {"rule": each.rule, "groups": list(map(_group_as_json, each.groups))} for each in manifest.optimizers
        ],
        "tensors": [
            dict(zip(_COLUMNS, _row(manifest, key, tensor), strict=True))
            | {"shape": list(tensor.shape), "bytes": tensor.numel * tensor.dtype.itemsize}
            for key, tensor in _in_order(manifest)
        ],
    }


def _decoded(group: GroupInfo) -> dict[str, Any]:
    """Returns a group's values; a tensor is replaced by its name in the file."""
    return values.decode_dict(group.values, lambda name: cast(torch.Tensor, f"tensor {name}"))


def _group_as_json(group: GroupInfo) -> dict[str, Json]:
    return {"params": len(group.params), **{key: _as_json(each) for key, each in _decoded(group).items()}}


def _as_json(value: object) -> Json:
    if isinstance(value, tuple | list):
        return [_as_json(each) for each in value]
    return value if value is None or isinstance(value, int | float | str) else str(value)


def _in_order(manifest: Manifest) -> Iterator[tuple[TensorKey, TensorInfo]]:
    for section in SECTIONS:
        yield from sorted(manifest.of(section))


def _row(manifest: Manifest, key: TensorKey, tensor: TensorInfo) -> tuple[str, ...]:
    name, kind = (key.name, key.kind) if key.section == "params" else (key.name, key.section)
    if key.section == "gradients":
        named = {"reduced": "gradient", "residual": "residual of gradients"}
        kind = named.get(key.kind, f"gradient of rank {key.kind}")
    if key.section == "rng":
        name, kind = f"rank {key.name}", f"rng {key.kind}"
    about = manifest.params[manifest.param_of[key.name]] if key.section == "params" else None
    step = str(about.step) if about is not None and about.has_state else ""
    held = ", ".join(f"{each.file[5:10].lstrip('0') or '0'}[{each.start}:{each.stop}]" for each in tensor.ranges[:3])
    more = f" +{len(tensor.ranges) - 3}" if len(tensor.ranges) > 3 else ""
    nbytes = tensor.numel * tensor.dtype.itemsize
    return name, kind, str(list(tensor.shape)), NAME_OF_DTYPE[tensor.dtype], step, size(nbytes), held + more


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for number, line in enumerate(lines):
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)


def verify(path: Path, advance: Advance = lambda nbytes: None) -> list[str]:
    """Reads every byte of one checkpoint. Returns what is wrong, in words; an empty list if nothing is."""
    try:
        checkpoint = Checkpoint(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    with checkpoint:
        damaged = set()
        for name in checkpoint.manifest.files:
            try:
                checkpoint.check_file(name)
            except CheckpointError as error:
                damaged.add(name)
                problems.append(str(error))
        for key, tensor in checkpoint.manifest.tensors.items():
            for chunk in file_chunks(key, tensor):
                try:
                    if chunk.file not in damaged:
                        checkpoint.read(chunk)
                except CheckpointError as error:
                    problems.append(str(error))
                advance(chunk.nbytes)
    return problems


def data_bytes(manifest: Manifest) -> int:
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in manifest.tensors.values())


def size(nbytes: float) -> str:
    """Returns a number of bytes as text, with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
