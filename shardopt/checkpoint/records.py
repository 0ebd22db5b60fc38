"""The manifest and its records: one for each tensor, file, param, optimizer and group. Frozen, JSON by their fields.

A reader of the format finds all of ``manifest.json`` here: the fields are its keys, in its order.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch

from ..errors import CheckpointError
from ..kernels.formats import FORMATS
from ..tensors.norm_table import Norms
from ..tensors.safetensors_format import DTYPES, NAME_OF_DTYPE
from .param_box import ParamBox
from .typed_json import (
    Above0,
    Count,
    Encoded,
    HexFloat,
    Json,
    Kind,
    Names,
    Shape,
    converted,
    in_order,
    kind_of,
    omitted,
    plain,
    renamed,
    to_json,
)

# Elements are read, verified and written in chunks of this size; larger reads gained nothing on two kinds of disk.
CHUNK_BYTES = 4 << 20

SECTIONS = ("params", "gradients", "buffers", "extra", "rng")
_SCALES = ".scales"


class TensorKey(NamedTuple):
    """One tensor of a checkpoint: ("params", "layer.weight", "exp_avg"), ("buffers", "norm.mean", "value"), ..."""

    section: str  # one of SECTIONS
    name: str
    kind: str

    @property
    def is_of_one_rank(self) -> bool:
        """True if only one rank has the tensor, so that ranks cannot compare it."""
        return self.section == "rng" or (self.section == "gradients" and self.kind not in ("reduced", "residual"))

    @property
    def scales(self) -> "TensorKey":
        """The key of the tensor that holds the scales of this tensor's blocks."""
        return self._replace(kind=f"{self.kind}{_SCALES}")

    @property
    def is_of_scales(self) -> bool:
        """True for a tensor of scales, which is only read with the tensor that they scale."""
        return self.section == "params" and self.kind.endswith(_SCALES)

    def __str__(self) -> str:
        return f"{self.kind} of {self.name!r}" if self.section == "params" else f"{self.section} {self.name!r}"


class ExpertIndex(NamedTuple):
    """One of several sets of ranks that hold different experts under one name."""

    number: Count
    total: Count

    def __str__(self) -> str:
        return f"{self.number}of{self.total}"

    def of(self, name: str) -> str:
        return f"{name}@{self}"


class BoxPlace(NamedTuple):
    """Where a box lies in its param."""

    offsets: Shape
    sizes: Shape


class FileInfo(NamedTuple):
    """One rank's file. The digest of its header identifies the file as part of this checkpoint."""

    nbytes: Count
    header_bytes: Count
    header_sha256: str


def _read_checksums(text: str) -> tuple[int, ...]:
    return tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))


def _write_checksums(sums: tuple[int, ...]) -> str:
    return "".join(f"{each:08x}" for each in sums)


Checksums = Annotated[tuple[int, ...], converted("checksums", _read_checksums, _write_checksums)]
DType = Annotated[torch.dtype, converted("a known dtype", DTYPES.__getitem__, NAME_OF_DTYPE.__getitem__)]
Encoding = Annotated[str, plain("a known encoding", lambda name: isinstance(name, str) and name in FORMATS)]
HexNorms = Annotated[Norms, in_order(Norms, {"two": HexFloat, "largest": HexFloat, "nonfinite": Count})]
Index = Annotated[int, plain("null, or one of the optimizers", lambda value: type(value) is int)]


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRange:
    """Elements ``[start, stop)`` of a tensor, in storage order, contiguous in one file.

    Attributes:
        offset: of their first byte in the file.
        checksums: one for each chunk of ``CHUNK_BYTES``.
    """

    start: Count
    stop: Count
    file: str
    offset: Count
    checksums: Checksums = renamed("crc32")


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype and place of one saved tensor.

    Attributes:
        strides: give the order in which the elements are numbered (0, 1, ... along storage).
        encoding: the format (see ``kernels/formats.py``) in which elements of this dtype encode fp32 values; empty if
            the elements are the values.
    """

    shape: Shape
    strides: Shape
    dtype: DType
    encoding: Encoding = omitted("")
    ranges: tuple[SavedRange, ...] = ()

    @property
    def values_dtype(self) -> torch.dtype:
        """The dtype of the decoded values."""
        return torch.float32 if self.encoding else self.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def check(self, key: TensorKey, files: Mapping[str, "FileInfo"]) -> None:
        """Raises CheckpointError unless the ranges cover the tensor once and lie within their files."""
        size = self.dtype.itemsize
        ordered = sorted(self.ranges, key=lambda each: each.start)
        ends = [0, *(each.stop for each in ordered)], [*(each.start for each in ordered), self.numel]
        whole = all(stop == start for stop, start in zip(*ends, strict=True))
        for each in ordered:
            file, nbytes = files.get(each.file), (each.stop - each.start) * size
            inside = file is not None and file.header_bytes <= each.offset and each.offset + nbytes <= file.nbytes
            whole = whole and (each.start < each.stop or not self.numel) and inside
            whole = whole and len(each.checksums) == -(-nbytes // CHUNK_BYTES)
        if not whole or len(self.shape) != len(self.strides):
            raise CheckpointError(
                f"load another checkpoint: the saved ranges of {key} do not make up its {self.numel} elements: "
                f"{[[each.start, each.stop, each.file, each.offset] for each in ordered]}. If no file was changed, "
                "this is a bug in shardopt."
            )


@dataclass(frozen=True, kw_only=True)
class GradientInfo:
    """The sum of a gradient that was reduced and not used by a step; the same on all ranks.

    Attributes:
        divisor: what the sum has to be divided by.
        norms: of the mean gradient, if they are known.
    """

    divisor: Above0
    norms: HexNorms | None = None


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """What is saved of a param beside its tensors.

    Attributes:
        place: placement of a DTensor, in a checkpoint of one part of a model, as older versions wrote them.
        turn: where several experts have the name.
        aliases: names that are tied to it.
        optimizer: index of the one that trains it; None: no optimizer does.
        carried: scalars that a rule carries from step to step, to the bit.
        shape, blocks: of a param that is saved in boxes (see ``param_box.py``).
    """

    place: str | None = omitted(None)
    turn: ExpertIndex | None = omitted(None)
    aliases: Names
    optimizer: Index | None
    step: Count
    carried: dict[str, HexFloat]
    has_state: bool
    shape: Shape = omitted(())
    blocks: tuple[BoxPlace, ...] | None = omitted(None)

    @property
    def boxes(self) -> list[ParamBox]:
        """The boxes that the param is saved in; none if it is not cut."""
        return [ParamBox(self.shape, *each) for each in self.blocks or ()]


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """A param group: the names of its params, and its encoded hyper-parameters."""

    params: Names
    values: Encoded


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo:
    """An optimizer: the name of its rule, whether that counts steps, and its param groups."""

    rule: str
    counts_steps: bool
    groups: tuple[GroupInfo, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint as a whole.

    Attributes:
        world: number of ranks that wrote it.
        shardopt, torch: their versions.
        gradients: by name of a box.
        extra: the user's, encoded.
        module_extra: the extra states of modules, encoded, by name.
        imported: from where, in words.
    """

    token: str
    sequence: Count
    step: Count
    world: Above0
    shardopt: str
    torch: str
    gradients: dict[str, GradientInfo] | None = omitted(None)
    extra: Encoded
    module_extra: Encoded
    imported: str | None = omitted(None)


_NESTED = kind_of(dict[str, dict[str, dict[str, TensorInfo]]])


def _read_tensors(nested: object) -> dict[TensorKey, TensorInfo]:
    found: dict[str, dict[str, dict[str, TensorInfo]]] = _NESTED.read(nested)
    return {
        TensorKey(section, name, kind): tensor
        for section, names in found.items()
        for name, kinds in names.items()
        for kind, tensor in kinds.items()
    }


def _write_tensors(tensors: Mapping[TensorKey, TensorInfo]) -> Json:
    nested: dict[str, dict[str, dict[str, Json]]] = {}
    for key, tensor in tensors.items():
        nested.setdefault(key.section, {}).setdefault(key.name, {})[key.kind] = to_json(tensor)
    return nested


Tensors = Annotated[dict[TensorKey, TensorInfo], Kind("an object", _read_tensors, _write_tensors)]


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the elements: what ``manifest.json`` holds, beside the format's version."""

    info: CheckpointInfo
    params: dict[str, ParamInfo]
    optimizers: tuple[OptimizerInfo, ...]
    files: dict[str, FileInfo]
    tensors: Tensors

    def of(self, section: str) -> Iterator[tuple[TensorKey, TensorInfo]]:
        return ((key, tensor) for key, tensor in self.tensors.items() if key.section == section)

    @cached_property
    def boxes(self) -> dict[str, dict[str, ParamBox]]:
        """By param: name of a box -> the box. A param that is not cut has one box, of its own name."""
        found = {}
        for name, about in self.params.items():
            whole = () if about.blocks else (ParamBox.whole(self.tensors[TensorKey("params", name, "param")].shape),)
            found[name] = {box.name_in(name): box for box in whole or about.boxes}
        return found

    @cached_property
    def param_of(self) -> dict[str, str]:
        """By name of tensors in "params" and "gradients": the param that the tensors belong to.

        Tensors of a box have the name of the box. Of a param that is saved in boxes, tensors of the param's own name
        are those that every rank has whole: states with a value for each row or column.
        """
        return {each: name for name, boxes in self.boxes.items() for each in (name, *boxes)}

    @cached_property
    def kinds(self) -> dict[str, dict[str, TensorInfo]]:
        """By param: kind ("param", "master" or a state) -> its tensor; without scales.

        Of a param that is saved in boxes the tensor has the shape of the whole param, and no ranges.
        """
        found: dict[str, dict[str, TensorInfo]] = {}
        for key, tensor in self.of("params"):
            if not key.is_of_scales:
                name = self.param_of[key.name]
                if name != key.name:
                    shape = self.params[name].shape
                    strides = torch.empty(shape, device="meta").stride()
                    tensor = replace(tensor, shape=shape, strides=strides, ranges=())
                found.setdefault(name, {}).setdefault(key.kind, tensor)
        return found

    @cached_property
    def names(self) -> dict[str, set[str]]:
        """By section: the names of its tensors."""
        return {section: {key.name for key, _ in self.of(section)} for section in SECTIONS}


def check_apart(tensors: Mapping[TensorKey, TensorInfo]) -> None:
    """Raises CheckpointError if a byte belongs to two tensors: one of them would load the other's values."""
    spans: dict[str, list[tuple[int, int, TensorKey]]] = {}
    for key, tensor in tensors.items():
        for each in tensor.ranges:
            nbytes = (each.stop - each.start) * tensor.dtype.itemsize
            spans.setdefault(each.file, []).append((each.offset, each.offset + nbytes, key))
    for file, its_spans in spans.items():
        for (_, end, one), (start, _, other) in pairwise(sorted(its_spans)):
            if start < end:
                raise CheckpointError(
                    f"load another checkpoint: {one} and {other} overlap in {file}, so it was not written by shardopt."
                )
