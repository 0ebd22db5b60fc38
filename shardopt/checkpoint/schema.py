"""Checks what the records of a manifest say of each other, before anything else reads it.

The digest of a manifest shows that nothing changed it, not that shardopt wrote it. The types of its records show what
each value is (``typed_json.py``). Code that reads a manifest later relies on the rest, which is checked here: names
refer to tensors that exist, boxes make up their params, encoded values can be decoded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

from ..kernels.formats import FORMATS, SPLIT, SPLIT24, BlockFormat
from ..kernels.tables import BLOCK
from .param_box import make_up
from .records import SECTIONS
from .typed_json import Json, refusal
from .values import MOST_LEVELS

if TYPE_CHECKING:
    from .records import Manifest, OptimizerInfo, TensorInfo, TensorKey

_MOST_LEVELS = 2 * MOST_LEVELS  # a tuple is a list in a dict


def check_schema(manifest: Manifest) -> None:
    """Raises CheckpointError if shardopt cannot have written the manifest."""
    for name, file in manifest.files.items():
        _demand(file.header_bytes <= file.nbytes, f"files.{name}", file.header_bytes, "a header within the file")
    for key, tensor in manifest.tensors.items():
        _demand(key.section in SECTIONS, f"tensors.{key.section}", key.section, "a known section")
        _check_tensor(manifest, key, tensor)
    _check_info(manifest)
    _check_params(manifest)
    for number, optimizer in enumerate(manifest.optimizers):
        _check_optimizer(manifest, number, optimizer)
    for key, tensor in manifest.tensors.items():
        _check_in_its_section(manifest, key, tensor)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if strides number the elements 0, 1, ... without gaps: those of a contiguous tensor, permuted."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


# -- tensors -----------------------------------------------------------------------------------------------------------


def _check_tensor(manifest: Manifest, key: TensorKey, tensor: TensorInfo) -> None:
    """Checks a tensor of any section."""
    where, shape, strides = f"tensors.{key.section}.{key.name}.{key.kind}", tensor.shape, tensor.strides
    _demand(len(shape) == len(strides), f"{where}.strides", strides, "one for each dimension")
    # torch multiplies the other sizes of an empty tensor too.
    extent = math.prod(size for size in shape if size)
    _demand(extent * tensor.dtype.itemsize < 1 << 62, f"{where}.shape", shape, "a shape that memory can hold")
    dense = 0 in shape or is_dense(shape, strides)
    _demand(dense, f"{where}.strides", strides, f"those of a dense tensor of shape {list(shape)}, in some order")
    if not tensor.encoding:
        return
    format, tensors = FORMATS[tensor.encoding], manifest.tensors
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


def _check_in_its_section(manifest: Manifest, key: TensorKey, tensor: TensorInfo) -> None:
    where = f"tensors.{key.section}.{key.name}"
    if key.section in ("buffers", "extra"):
        _demand(key.kind == "value", where, key.kind, "a value")
        return
    if key.section == "rng":
        _check_rank(manifest, key.name, "tensors.rng")
        is_bytes = tensor.dtype is torch.uint8 and len(tensor.shape) == 1
        _demand(is_bytes, f"{where}.{key.kind}", tensor.dtype, "bytes")
        return
    _demand(key.name in manifest.param_of, where, key.name, "the name of a param or of a box of one")
    if key.kind == "param" or key.is_of_scales:
        return
    _demand(tensor.values_dtype.is_floating_point, f"{where}.{key.kind}", tensor.dtype, "floating point numbers")
    if key.section == "params":
        return
    if key.kind == "reduced":
        is_of_experts = manifest.params[manifest.param_of[key.name]].turn is not None
        is_described = is_of_experts or key.name in (manifest.info.gradients or {})
        _demand(is_described, where, key.kind, "a gradient that info describes")
    elif key.kind != "residual":
        _check_rank(manifest, key.kind, where)
    param = manifest.tensors.get(key._replace(section="params", kind="param"))
    fits = param is not None and tensor.shape == param.shape
    _demand(fits, f"{where}.{key.kind}.shape", tensor.shape, f"the param's, {param and param.shape}")


def _check_rank(manifest: Manifest, name: str, where: str) -> None:
    is_rank = name.isascii() and name.isdigit() and int(name[:9]) < manifest.info.world and len(name) < 9
    _demand(is_rank, where, name, f"one of {manifest.info.world} ranks")


# -- info, params and optimizers ---------------------------------------------------------------------------------------


def _check_info(manifest: Manifest) -> None:
    info = manifest.info
    _check_dict(manifest, info.extra, "info.extra")
    for name, value in info.module_extra.items():
        _check_encoded(manifest, value, f"info.module_extra.{name}")
    for name in info.gradients or {}:
        _demand(name in manifest.names["gradients"], f"info.gradients.{name}", name, "the name of a gradient")


def _check_params(manifest: Manifest) -> None:
    optimizers = manifest.optimizers
    kinds_of: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for key, tensor in manifest.of("params"):
        if not key.is_of_scales:
            kinds_of[key.name][key.kind] = tensor
    for name, about in manifest.params.items():
        where = f"params.{name}"
        if about.blocks is not None:
            _check_boxes(manifest, name, kinds_of)
        else:
            _demand("param" in kinds_of.get(name, ()), where, name, "the name of a tensor")
        turn = about.turn
        _demand(turn is None or turn.number < turn.total, f"{where}.turn", turn, "a number below another one")
        known = about.optimizer is None or 0 <= about.optimizer < len(optimizers)
        _demand(known, f"{where}.optimizer", about.optimizer, f"null, or one of {len(optimizers)} optimizers")


def _check_boxes(manifest: Manifest, name: str, kinds_of: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Checks that the boxes make up the param, and that each box has the same masters and states."""
    about, where = manifest.params[name], f"params.{name}.blocks"
    shape, boxes = about.shape, about.boxes
    _demand(len(boxes) > 1 and make_up(shape, boxes), where, about.blocks, f"boxes of a param of shape {list(shape)}")
    names = [box.name_in(name) for box in boxes]
    first = kinds_of.get(names[0], {})
    for each, box in zip(names, boxes, strict=True):
        _demand(each not in manifest.params, where, each, "a name that no param has")
        own = kinds_of.get(each, {})
        _demand("param" in own and own.keys() == first.keys(), f"{where}.{each}", list(own), f"{list(first)}")
        for kind, tensor in own.items():
            _demand(tensor.shape == box.sizes, f"{where}.{each}.{kind}", tensor.shape, f"shape {box.sizes}")
            alike = tensor.values_dtype is first[kind].values_dtype
            _demand(alike, f"{where}.{each}.{kind}", tensor.dtype, f"{first[kind].values_dtype}")
    for kind, tensor in kinds_of.get(name, {}).items():  # whole on every rank: a value for each row or column
        _demand(kind not in first, f"{where}.{name}.{kind}", kind, "a state that no box has")
        fits = len(tensor.shape) == len(shape) and all(
            size in (1, of) for size, of in zip(tensor.shape, shape, strict=True)
        )
        _demand(fits, f"params.{name}.{kind}", tensor.shape, f"sums over dimensions of shape {tuple(shape)}")


def _check_optimizer(manifest: Manifest, number: int, optimizer: OptimizerInfo) -> None:
    params, where, listed = manifest.params, f"optimizers.{number}", set[str]()
    for index, group in enumerate(optimizer.groups):
        at = f"{where}.groups.{index}"
        for name in group.params:
            own = name in params and params[name].optimizer == number
            _demand(own, f"{at}.params", name, "the name of a param of this optimizer")
        listed.update(group.params)
        _check_dict(manifest, group.values, f"{at}.values")
        wrong = [key for key in ("params", "param_names", "process_group") if key in group.values]
        _demand(not wrong, f"{at}.values", wrong, "a hyper-parameter")
    for name, about in params.items():
        in_group = about.optimizer != number or name in listed
        _demand(in_group, f"params.{name}.optimizer", number, "an optimizer that has it in a group")


# -- encoded values ----------------------------------------------------------------------------------------------------


def _check_dict(manifest: Manifest, value: Mapping[str, Json], where: str) -> None:
    """Checks an object that decodes to a dict."""
    wraps = len(value) == 1 and next(iter(value)) in ("$tensor", "$float", "$tuple")
    _demand(not wraps, where, value, "a dict")
    _check_encoded(manifest, value, where)


def _check_encoded(manifest: Manifest, value: Json, where: str) -> None:
    """Checks that ``values.decode`` can read the value."""
    left = [(value, 0)]
    while left:
        each, level = left.pop()
        _demand(level <= _MOST_LEVELS, where, "...", f"at most {_MOST_LEVELS} nested lists and dicts")
        if isinstance(each, dict | list):
            items = _items(manifest, each, where) if isinstance(each, dict) else each
            left += [(item, level + 1) for item in items]


def _items(manifest: Manifest, value: Mapping[str, Json], where: str) -> list[Json]:
    """Returns the encoded values in an object."""
    if len(value) != 1:
        return list(value.values())
    ((key, content),) = value.items()
    if key == "$tensor":
        known = isinstance(content, str) and content in manifest.names["extra"]
        _demand(known, where, value, "the name of a tensor in extra")
        return []
    if key == "$float":
        _demand(_is_float(content), where, value, "a number as text")
        return []
    if key == "$tuple":
        _demand(isinstance(content, list), where, value, "a list")
    if key == "$dict":
        if not isinstance(content, Mapping):
            raise refusal(where, content, "an object")
        return list(content.values())
    if key in ("$items", "$counter"):
        if not _are_items(content):
            raise refusal(where, value, "a list of keys, strings or integers, with their values")
        return [item for _, item in content]
    return [content]


def _is_float(content: Json) -> bool:
    try:
        float(content if isinstance(content, str) else "")
    except ValueError:
        return False
    return True


def _are_items(content: object) -> TypeGuard[Sequence[tuple[object, Json]]]:
    return isinstance(content, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str | int) for each in content
    )


def _demand(holds: bool, where: str, found: object, expected: str) -> None:
    if not holds:
        raise refusal(where, found, expected)
