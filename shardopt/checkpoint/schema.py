"""What a manifest may say: every name, count and reference in it, checked once, before anything is done with it.

A digest proves that a manifest is as somebody wrote it, not that shardopt did. Whoever reads a manifest later relies on
what is checked here: names refer to what is there, counts are counts, encoded values can be decoded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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
    """The part of a manifest that is checked."""

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


# -- kinds of values ---------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    expected: str  # for the message
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _parses(parse: Callable[[str], float], value: Any) -> bool:
    try:
        parse(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return isinstance(value, str)


def _is_hex(value: Any) -> bool:
    return _parses(float.fromhex, value)


def _are_norms(value: Any) -> bool:
    known = isinstance(value, list) and len(value) == 3
    return value is None or (known and _is_hex(value[0]) and _is_hex(value[1]) and _is_count(value[2]))


def _is_turn(value: Any) -> bool:
    known = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    return known and 0 <= value[0] < value[1]


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_COUNT = _Kind("a count", _is_count)
_ABOVE_0 = _Kind("a number of ranks", lambda value: _is_count(value) and value > 0)
_HEX = _Kind("a number in hexadecimal digits", _is_hex)
_LIST = _Kind("a list", lambda value: isinstance(value, list | tuple))
_NAMES = _Kind("a list of names", lambda value: _LIST.holds(value) and all(isinstance(each, str) for each in value))
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_NORMS = _Kind("two norms and a count", _are_norms)
_TURN = _Kind("a number below another one", _is_turn)

# Keys that must be there, and keys that may be.
_Fields = Mapping[str, _Kind]
_INFO: _Fields = {
    **dict.fromkeys(("token", "shardopt", "torch"), _TEXT),
    **dict.fromkeys(("sequence", "step"), _COUNT),
    **dict.fromkeys(("extra", "module_extra"), _OBJECT),
    "world": _ABOVE_0,
}
_INFO_OPTIONAL: _Fields = {"imported": _TEXT, "gradients": _OBJECT}
_GRADIENT: _Fields = {"divisor": _ABOVE_0}
_GRADIENT_OPTIONAL: _Fields = {"norms": _NORMS}
_PARAM: _Fields = {"aliases": _NAMES, "step": _COUNT, "has_state": _FLAG, "carried": _OBJECT}
_PARAM_OPTIONAL: _Fields = {"place": _TEXT, "turn": _TURN}
_OPTIMIZER: _Fields = {"rule": _TEXT, "counts_steps": _FLAG, "groups": _LIST}
_GROUP: _Fields = {"params": _NAMES, "values": _OBJECT}


def check_schema(manifest: Contents) -> None:
    """Raises CheckpointError if the manifest says what shardopt never writes."""
    _Checking(manifest).run()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if strides number the elements 0, 1, ... without gaps: those of a contiguous tensor, permuted."""
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
        for number, optimizer in enumerate(self.manifest.optimizers):
            self._optimizer(number, optimizer)
        for key, tensor in self.manifest.tensors.items():
            self._in_its_section(key, tensor)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _tensor(self, key: Key, tensor: Tensor) -> None:
        """Checks what must hold of a tensor in any section."""
        where, shape, strides = f"tensors.{key.section}.{key.name}.{key.kind}", tensor.shape, tensor.strides
        _demand(len(shape) == len(strides) <= _MOST_DIMENSIONS, f"{where}.strides", strides, "one for each dimension")
        # torch multiplies the other sizes of an empty tensor too.
        extent = math.prod(size for size in shape if size)
        _demand(extent * tensor.dtype.itemsize < 1 << 62, f"{where}.shape", shape, "a shape that memory can hold")
        dense = 0 in shape or is_dense(shape, strides)
        _demand(dense, f"{where}.strides", strides, f"those of a dense tensor of shape {list(shape)}, in some order")
        if not tensor.encoding:
            return
        format, tensors = FORMATS[tensor.encoding], self.manifest.tensors
        _demand(key.section == "params" and not key.is_of_scales, f"{where}.encoding", tensor.encoding, "no encoding")
        _demand(tensor.dtype is format.dtype, f"{where}.dtype", tensor.dtype, str(format.dtype))
        if isinstance(format, BlockFormat):
            scales, wanted = tensors.get(key.scales), ((-(-tensor.numel // BLOCK),), torch.float32, "")
            fits = scales is not None and (scales.shape, scales.dtype, scales.encoding) == wanted
            _demand(fits, f"{where}.scales", scales and scales.shape, "an fp32 scale for each block")
        if format in (SPLIT, SPLIT24):
            param = tensors.get(key._replace(kind="param"))
            fits = param is not None and (param.shape, param.dtype, param.strides) == (shape, torch.bfloat16, strides)
            _demand(fits, where, param and param.dtype, "the other half of a bf16 param")

    def _in_its_section(self, key: Key, tensor: Tensor) -> None:
        where = f"tensors.{key.section}.{key.name}"
        if key.section in ("buffers", "extra"):
            _demand(key.kind == "value", where, key.kind, "a value")
            return
        if key.section == "rng":
            self._rank(key.name, "tensors.rng")
            is_bytes = tensor.dtype is torch.uint8 and len(tensor.shape) == 1
            _demand(is_bytes, f"{where}.{key.kind}", tensor.dtype, "bytes")
            return
        _demand(key.name in self.manifest.params, where, key.name, "the name of a param")
        if key.kind == "param" or key.is_of_scales:
            return
        _demand(tensor.values_dtype.is_floating_point, f"{where}.{key.kind}", tensor.dtype, "floating point numbers")
        if key.section == "params":
            return
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

    # -- info, params and optimizers -------------------------------------------------------------------------------

    def _info(self) -> None:
        info = self.manifest.info
        _check(info, "info", _INFO, _INFO_OPTIONAL)
        self._dict(info["extra"], "info.extra")
        for name, value in info["module_extra"].items():
            self._encoded(value, f"info.module_extra.{name}")
        for name, about in info.get("gradients", {}).items():
            where = f"info.gradients.{name}"
            _demand(name in self.names["gradients"], where, name, "the name of a gradient")
            _check(about, where, _GRADIENT, _GRADIENT_OPTIONAL)

    def _params(self) -> None:
        params, optimizers = self.manifest.params, self.manifest.optimizers
        _demand(_OBJECT.holds(params), "params", params, _OBJECT.expected)
        _demand(_LIST.holds(optimizers), "optimizers", optimizers, _LIST.expected)
        of_params = {key.name for key in self.manifest.tensors if key.section == "params" and key.kind == "param"}
        for name, about in params.items():
            where = f"params.{name}"
            _demand(name in of_params, where, name, "the name of a tensor")
            _check(about, where, _PARAM, _PARAM_OPTIONAL)
            _check(about["carried"], f"{where}.carried", dict.fromkeys(about["carried"], _HEX))
            number = about.get("optimizer", -1)
            known = number is None or (type(number) is int and 0 <= number < len(optimizers))
            _demand(known, f"{where}.optimizer", number, f"null, or one of {len(optimizers)} optimizers")

    def _optimizer(self, number: int, optimizer: Any) -> None:
        params, where, listed = self.manifest.params, f"optimizers.{number}", set[str]()
        _check(optimizer, where, _OPTIMIZER)
        for index, group in enumerate(optimizer["groups"]):
            at = f"{where}.groups.{index}"
            _check(group, at, _GROUP)
            for name in group["params"]:
                own = name in params and params[name]["optimizer"] == number
                _demand(own, f"{at}.params", name, "the name of a param of this optimizer")
            listed.update(group["params"])
            self._dict(group["values"], f"{at}.values")
            wrong = [key for key in ("params", "param_names", "process_group") if key in group["values"]]
            _demand(not wrong, f"{at}.values", wrong, "a hyper-parameter")
        for name, about in params.items():
            in_group = about["optimizer"] != number or name in listed
            _demand(in_group, f"params.{name}.optimizer", number, "an optimizer that has it in a group")

    # -- encoded values --------------------------------------------------------------------------------------------

    def _dict(self, value: Mapping[str, Any], where: str) -> None:
        """Checks an object that is a dict once it is decoded."""
        wraps = len(value) == 1 and next(iter(value)) in ("$tensor", "$float", "$tuple")
        _demand(not wraps, where, value, "a dict")
        self._encoded(value, where)

    def _encoded(self, value: Any, where: str) -> None:
        """Checks that ``values.decode`` can read the value."""
        left = [(value, 0)]
        while left:
            each, level = left.pop()
            _demand(level <= _MOST_LEVELS, where, "...", f"at most {_MOST_LEVELS} lists and dicts within each other")
            if isinstance(each, dict | list):
                items = self._items(each, where) if isinstance(each, dict) else each
                left += [(item, level + 1) for item in items]
            else:
                plain = each is None or isinstance(each, str | bool | int | float)
                _demand(plain, where, each, "a plain value")

    def _items(self, value: Mapping[str, Any], where: str) -> list[Any]:
        """Returns what lies in an object and is to be decoded."""
        if len(value) != 1:
            return list(value.values())
        ((key, content),) = value.items()
        if key == "$tensor":
            known = isinstance(content, str) and content in self.names["extra"]
            _demand(known, where, value, "the name of a tensor in extra")
            return []
        if key == "$float":
            _demand(_parses(float, content), where, value, "a number in words")
            return []
        if key == "$tuple":
            _demand(isinstance(content, list), where, value, "a list")
        if key == "$dict":
            _demand(_OBJECT.holds(content), where, content, _OBJECT.expected)
            return list(content.values())
        return [content]


def _check(value: Any, where: str, required: _Fields, optional: _Fields | None = None) -> None:
    """Checks an object by its fields."""
    _demand(_OBJECT.holds(value), where, value, _OBJECT.expected)
    for key, kind in {**required, **(optional or {})}.items():
        if key in value or key in required:
            _demand(key in value and kind.holds(value[key]), f"{where}.{key}", value.get(key), kind.expected)


def _demand(holds: bool, where: str, found: Any, expected: str) -> None:
    if not holds:
        told = repr(found) if isinstance(found, str | int | float | torch.dtype | None) else type(found).__name__
        if isinstance(found, tuple | list):
            told = repr(list(found[:8]))
        raise CheckpointError(
            f"load another checkpoint: the manifest says {where[:200]} = {told[:200]}, where {expected} belongs, so "
            "shardopt did not write it, and nothing was loaded. If no file was changed, this is a bug in shardopt."
        )
