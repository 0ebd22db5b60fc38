"""What a manifest may say: every name, count and reference in it, checked once, before anything is done with it.

A digest proves that a manifest is as somebody wrote it, not that shardopt did. Whoever reads one further on relies on
what is checked here: that names refer to what is there, that counts are counts, that encoded values can be decoded.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import CheckpointError
from ..kernels.formats import FORMATS, SPLIT, SPLIT24, BlockFormat
from ..kernels.tables import BLOCK
from .records import File, Key, Tensor
from .values import MOST_LEVELS

_MOST_LEVELS = 2 * MOST_LEVELS  # a tuple is a list in a dict
_MOST_DIMENSIONS = 64  # of a tensor of torch's
_SECTIONS = ("params", "gradients", "buffers", "extra", "rng")


class Contents(Protocol):
    """What is checked of a manifest."""

    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def optimizers(self) -> Sequence[Any]: ...
    @property
    def files(self) -> Mapping[str, File]: ...
    @property
    def tensors(self) -> Mapping[Key, Tensor]: ...


def check_schema(manifest: Contents) -> None:
    """
    Raises:
        CheckpointError: the manifest says what shardopt never writes.
    """
    _Checking(manifest).run()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides number the elements 0, 1, ... without gaps: those of a contiguous tensor, permuted."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _Checking:
    def __init__(self, manifest: Contents):
        self.manifest = manifest
        self.names: dict[str, set[str]] = {section: set() for section in _SECTIONS}

    def run(self) -> None:
        for name, file in self.manifest.files.items():
            _demand(file.header_bytes <= file.nbytes, f"files.{name}", file.header_bytes, "a header within the file")
        for key, tensor in self.manifest.tensors.items():
            _demand(key.section in self.names, f"tensors.{key.section}", key.section, "a known section")
            self.names[key.section].add(key.name)
            self._tensor(key, tensor)
        self._info()
        self._params()
        self._optimizers()
        for key, tensor in self.manifest.tensors.items():
            self._in_its_section(key, tensor)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _tensor(self, key: Key, tensor: Tensor) -> None:
        """What must hold of each, whatever it is."""
        where, shape, strides = f"tensors.{key.section}.{key.name}.{key.kind}", tensor.shape, tensor.strides
        _demand(len(shape) == len(strides) <= _MOST_DIMENSIONS, f"{where}.strides", strides, "one for each dimension")
        # torch multiplies the other sizes of an empty tensor too.
        extent = math.prod(size for size in shape if size)
        _demand(extent * tensor.dtype.itemsize < 1 << 62, f"{where}.shape", shape, "a shape that memory can hold")
        dense = 0 in shape or is_dense(shape, strides)
        _demand(dense, f"{where}.strides", strides, f"those of a dense tensor of shape {list(shape)}, in some order")
        if not tensor.encoding:
            return
        format = FORMATS[tensor.encoding]
        _demand(key.section == "params" and not key.is_of_scales, f"{where}.encoding", tensor.encoding, "no encoding")
        _demand(tensor.dtype is format.dtype, f"{where}.dtype", tensor.dtype, str(format.dtype))
        if isinstance(format, BlockFormat):
            scales = self.manifest.tensors.get(key.scales)
            fits = scales is not None and (scales.shape, scales.dtype, scales.encoding) == (
                (-(-tensor.numel // BLOCK),),
                torch.float32,
                "",
            )
            _demand(fits, f"{where}.scales", scales and scales.shape, "an fp32 scale for each block")
        if format in (SPLIT, SPLIT24):
            param = self.manifest.tensors.get(key._replace(kind="param"))
            fits = param is not None and (param.shape, param.dtype, param.strides) == (shape, torch.bfloat16, strides)
            _demand(fits, where, param and param.dtype, "the other half of a bf16 param")

    def _in_its_section(self, key: Key, tensor: Tensor) -> None:
        where = f"tensors.{key.section}.{key.name}"
        if key.section in ("buffers", "extra"):
            _demand(key.kind == "value", where, key.kind, "a value")
        elif key.section == "rng":
            self._rank(key.name, "tensors.rng")
            is_bytes = tensor.dtype is torch.uint8 and len(tensor.shape) == 1
            _demand(is_bytes, f"{where}.{key.kind}", tensor.dtype, "bytes")
        else:
            _demand(key.name in self.manifest.params, where, key.name, "the name of a param")
            if key.kind == "param" or key.is_of_scales:
                return
            floating = tensor.values_dtype.is_floating_point
            _demand(floating, f"{where}.{key.kind}", tensor.dtype, "floating point numbers")
            if key.section == "gradients":
                if key.kind == "reduced":
                    known = self.manifest.info.get("gradients", {})
                    told = "turn" in self.manifest.params[key.name] or key.name in known
                    _demand(told, where, key.kind, "what info tells of it")
                else:
                    self._rank(key.kind, where)
                whole = self.manifest.tensors[key._replace(section="params", kind="param")].shape
                _demand(tensor.shape == whole, f"{where}.{key.kind}.shape", tensor.shape, f"the param's, {whole}")

    def _rank(self, name: str, where: str) -> None:
        is_rank = name.isascii() and name.isdigit() and int(name[:9]) < self.manifest.info["world"] and len(name) < 9
        _demand(is_rank, where, name, f"one of {self.manifest.info['world']} ranks")

    # -- info ------------------------------------------------------------------------------------------------------

    def _info(self) -> None:
        info = self.manifest.info
        _mapping(info, "info")
        for key in ("token", "shardopt", "torch"):
            _demand(isinstance(info.get(key), str), f"info.{key}", info.get(key), "a text")
        for key in ("sequence", "step", "world"):
            _count(info.get(key), f"info.{key}")
        _demand(info["world"] > 0, "info.world", info["world"], "a number of ranks")
        imported = info.get("imported", "")
        _demand(isinstance(imported, str), "info.imported", imported, "a text")
        self._dict(info.get("extra"), "info.extra")
        for name, value in _mapping(info.get("module_extra"), "info.module_extra").items():
            self._encoded(value, f"info.module_extra.{name}")
        for name, about in _mapping(info.get("gradients", {}), "info.gradients").items():
            where = f"info.gradients.{name}"
            _demand(name in self.names["gradients"], where, name, "the name of a gradient")
            _mapping(about, where)
            divisor, norms = about.get("divisor"), about.get("norms")
            _demand(type(divisor) is int and 0 < divisor < 1 << 62, f"{where}.divisor", divisor, "a number of ranks")
            known = isinstance(norms, list) and len(norms) == 3
            _demand(norms is None or known, f"{where}.norms", norms, "two norms and a count")
            if norms is not None:
                _hex(norms[0], f"{where}.norms")
                _hex(norms[1], f"{where}.norms")
                _count(norms[2], f"{where}.norms")

    # -- params and optimizers -------------------------------------------------------------------------------------

    def _params(self) -> None:
        params, optimizers = self.manifest.params, self.manifest.optimizers
        _mapping(params, "params")
        _demand(isinstance(optimizers, list | tuple), "optimizers", optimizers, "a list")
        of_params = {key.name for key in self.manifest.tensors if key.section == "params" and key.kind == "param"}
        for name, about in params.items():
            where = f"params.{name}"
            _demand(name in of_params, where, name, "the name of a tensor")
            _mapping(about, where)
            _names(about.get("aliases"), f"{where}.aliases")
            number = about.get("optimizer", -1)
            known = number is None or (type(number) is int and 0 <= number < len(optimizers))
            _demand(known, f"{where}.optimizer", number, f"null, or one of {len(optimizers)} optimizers")
            _count(about.get("step"), f"{where}.step")
            _demand(type(about.get("has_state")) is bool, f"{where}.has_state", about.get("has_state"), "true or false")
            for key, value in _mapping(about.get("carried"), f"{where}.carried").items():
                _hex(value, f"{where}.carried.{key}")
            _demand(isinstance(about.get("place", ""), str), f"{where}.place", about.get("place"), "a text")
            turn = about.get("turn", [0, 1])
            is_turn = isinstance(turn, list) and len(turn) == 2 and all(type(each) is int for each in turn)
            _demand(is_turn and 0 <= turn[0] < turn[1], f"{where}.turn", turn, "a number below another one")

    def _optimizers(self) -> None:
        params = self.manifest.params
        for number, optimizer in enumerate(self.manifest.optimizers):
            where = f"optimizers.{number}"
            _mapping(optimizer, where)
            _demand(isinstance(optimizer.get("rule"), str), f"{where}.rule", optimizer.get("rule"), "a name")
            counts = optimizer.get("counts_steps")
            _demand(type(counts) is bool, f"{where}.counts_steps", counts, "true or false")
            _demand(isinstance(optimizer.get("groups"), list), f"{where}.groups", optimizer.get("groups"), "a list")
            listed: set[str] = set()
            for index, group in enumerate(optimizer["groups"]):
                at = f"{where}.groups.{index}"
                _mapping(group, at)
                for name in _names(group.get("params"), f"{at}.params"):
                    own = name in params and params[name]["optimizer"] == number
                    _demand(own, f"{at}.params", name, "the name of a param of this optimizer")
                    listed.add(name)
                self._dict(group.get("values"), f"{at}.values")
                own = [key for key in ("params", "param_names", "process_group") if key in group["values"]]
                _demand(not own, f"{at}.values", own, "a hyper-parameter")
            for name, about in params.items():
                in_group = about["optimizer"] != number or name in listed
                _demand(in_group, f"params.{name}.optimizer", number, "an optimizer that has it in a group")

    # -- encoded values --------------------------------------------------------------------------------------------

    def _dict(self, value: Any, where: str) -> None:
        """A dict once it is decoded."""
        _mapping(value, where)
        wraps = len(value) == 1 and next(iter(value)) in ("$tensor", "$float", "$tuple")
        _demand(not wraps, where, value, "a dict")
        self._encoded(value, where)

    def _encoded(self, value: Any, where: str) -> None:
        """What ``values.decode`` can read."""
        left = [(value, 0)]
        while left:
            each, level = left.pop()
            _demand(level <= _MOST_LEVELS, where, "...", f"at most {_MOST_LEVELS} lists and dicts within each other")
            if isinstance(each, dict):
                left += [(item, level + 1) for item in self._items(each, where)]
            elif isinstance(each, list):
                left += [(item, level + 1) for item in each]
            else:
                plain = each is None or isinstance(each, str | bool | int | float)
                _demand(plain, where, each, "a plain value")

    def _items(self, value: Mapping[str, Any], where: str) -> list[Any]:
        """What is in it and to be decoded."""
        if len(value) != 1:
            return list(value.values())
        ((key, content),) = value.items()
        if key == "$tensor":
            known = isinstance(content, str) and content in self.names["extra"]
            _demand(known, where, value, "the name of a tensor in extra")
            return []
        if key == "$float":
            _demand(isinstance(content, str) and _is_float(content), where, value, "a number in words")
            return []
        if key == "$tuple":
            _demand(isinstance(content, list), where, value, "a list")
        if key == "$dict":
            return list(_mapping(content, where).values())
        return [content]


def _demand(holds: bool, where: str, found: Any, expected: str) -> None:
    if not holds:
        told = repr(found) if isinstance(found, str | int | float | torch.dtype | None) else type(found).__name__
        if isinstance(found, tuple | list):
            told = repr(list(found[:8]))
        raise CheckpointError(
            f"the manifest says {where[:200]} = {told[:200]}, where {expected} belongs: shardopt did not write it, so "
            "nothing was loaded. Load another checkpoint; if no file was changed, this is a bug in shardopt."
        )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    _demand(isinstance(value, Mapping), where, value, "an object")
    found: Mapping[str, Any] = value
    return found


def _names(value: Any, where: str) -> list[str]:
    found = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    _demand(found, where, value, "a list of names")
    return list(value)


def _count(value: Any, where: str) -> None:
    _demand(type(value) is int and 0 <= value < 1 << 62, where, value, "a count")


def _hex(value: Any, where: str) -> None:
    try:
        float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        _demand(False, where, value, "a number in hexadecimal digits")


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
