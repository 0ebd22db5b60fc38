"""The manifest and its records, one for each tensor and file: frozen, converted to JSON and back."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..kernels.formats import FORMATS
from .param_box import ParamBox, boxes_of

# Elements are read, verified and written in chunks of this size; larger reads gained nothing on two kinds of disk.
CHUNK_BYTES = 4 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SECTIONS = ("params", "gradients", "buffers", "extra", "rng")
_SCALES = ".scales"
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


class TensorKey(NamedTuple):
    """One tensor of a checkpoint: ("params", "layer.weight", "exp_avg"), ("buffers", "norm.mean", "value"), ..."""

    section: str  # one of SECTIONS
    name: str
    kind: str

    @property
    def is_of_one_rank(self) -> bool:
        """True if only one rank has the tensor, so that ranks cannot compare it."""
        return self.section == "rng" or (self.section == "gradients" and self.kind != "reduced")

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


@dataclass(frozen=True)
class SavedRange:
    """Elements ``[start, stop)`` of a tensor, in storage order, contiguous in one file.

    Attributes:
        offset: of their first byte in the file.
        checksums: one for each chunk of ``CHUNK_BYTES``.
    """

    start: int
    stop: int
    file: str
    offset: int
    checksums: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        sums = "".join(f"{each:08x}" for each in self.checksums)
        return {"start": self.start, "stop": self.stop, "file": self.file, "offset": self.offset, "crc32": sums}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "SavedRange":
        text = value["crc32"]
        sums = tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))
        return SavedRange(count(value["start"]), count(value["stop"]), value["file"], count(value["offset"]), sums)


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype and place of one saved tensor.

    Attributes:
        strides: give the order in which the elements are numbered (0, 1, ... along storage).
        encoding: the format (see ``kernels/formats.py``) in which elements of this dtype encode fp32 values; empty if
            the elements are the values.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[SavedRange, ...]
    encoding: str = ""

    @property
    def values_dtype(self) -> torch.dtype:
        """The dtype of the decoded values."""
        return torch.float32 if self.encoding else self.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        ranges = [each.to_json() for each in self.ranges]
        dtype = NAME_OF_DTYPE[self.dtype]
        encoding = {"encoding": self.encoding} if self.encoding else {}
        return {"shape": list(self.shape), "strides": list(self.strides), "dtype": dtype, **encoding, "ranges": ranges}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "TensorInfo":
        shape, strides = (tuple(count(each) for each in value[key]) for key in ("shape", "strides"))
        ranges = tuple(SavedRange.from_json(each) for each in value["ranges"])
        encoding = value.get("encoding", "")
        if encoding and encoding not in FORMATS:
            raise ValueError(f"the encoding {encoding!r} is not known")
        return TensorInfo(shape, strides, DTYPES[value["dtype"]], ranges, encoding)

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


@dataclass(frozen=True)
class FileInfo:
    """One rank's file. The digest of its header identifies the file as part of this checkpoint."""

    nbytes: int
    header_bytes: int
    header_sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the elements.

    Attributes:
        info: JSON: token, sequence, step, world, versions, and the encoded ``extra``.
        params: by name: aliases (names that are tied to it), optimizer (its index, or None), step, carried, has_state;
            "shape" and "blocks" (offsets and sizes) of a param that is saved in boxes (see ``param_box.py``); "turn"
            (index, number) where several experts have the name.
        optimizers: rule, whether it counts steps, groups (params by name, encoded values).
    """

    info: Mapping[str, Any]
    params: Mapping[str, Any]
    optimizers: Sequence[Any]
    files: Mapping[str, FileInfo]
    tensors: Mapping[TensorKey, TensorInfo]

    def of(self, section: str) -> Iterator[tuple[TensorKey, TensorInfo]]:
        return ((key, tensor) for key, tensor in self.tensors.items() if key.section == section)

    @cached_property
    def boxes(self) -> dict[str, dict[str, ParamBox]]:
        """By param: name of a box -> the box. A param that is not cut has one box, of its own name."""
        found = {}
        for name, about in self.params.items():
            if "blocks" not in about:
                shape = self.tensors[TensorKey("params", name, "param")].shape
                found[name] = {name: ParamBox.whole(shape)}
                continue
            found[name] = {box.name_in(name): box for box in boxes_of(about)}
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
                    shape = tuple(self.params[name]["shape"])
                    strides = torch.empty(shape, device="meta").stride()
                    tensor = replace(tensor, shape=shape, strides=strides, ranges=())
                found.setdefault(name, {}).setdefault(key.kind, tensor)
        return found

    def carried(self, name: str) -> dict[str, float]:
        """Returns the scalars that a rule carries from step to step with a param, to the bit."""
        return {scalar: float.fromhex(value) for scalar, value in self.params[name]["carried"].items()}

    @cached_property
    def names(self) -> dict[str, set[str]]:
        """By section: the names of its tensors."""
        return {section: {key.name for key, _ in self.of(section)} for section in SECTIONS}


def tensors_to_json(tensors: Mapping[TensorKey, TensorInfo]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, tensor in tensors.items():
        nested.setdefault(key.section, {}).setdefault(key.name, {})[key.kind] = tensor.to_json()
    return nested


def tensors_from_json(nested: Mapping[str, Any]) -> dict[TensorKey, TensorInfo]:
    return {
        TensorKey(section, name, kind): TensorInfo.from_json(value)
        for section, names in nested.items()
        for name, kinds in names.items()
        for kind, value in kinds.items()
    }


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r} is not a count")
    return int(value)


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
