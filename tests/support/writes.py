"""Every way to write to a tensor: operations of torch's schemas that write, indices, setters, writes through views."""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# They change what a tensor is and not its values; assignments to ``.data`` stand for them.
_OF_METADATA = (
    "resize",
    "set_",
    "as_strided_",
    "squeeze_",
    "t_",
    "transpose_",
    "swap",
    "rename",
    "detach_",
    "unsqueeze_",
    "set.",
)


Candidate = Callable[[], "Write | None"]


class Write(NamedTuple):
    """One way to write. ``call`` writes to the tensor that it is given."""

    name: str
    call: Callable[[Tensor], object]
    is_random: bool = False


def writes(like: Tensor, count: int, draw: random.Random, with_schemas: bool = True) -> list[Write]:
    """Returns ways that change a plain tensor of this shape and dtype: ``count`` of them, drawn, or all there are.

    Args:
        with_schemas: False leaves out the operations of torch's schemas, which are most.
    """
    candidates = [
        *(_of_schemas(like) if with_schemas else ()),
        *map(_as_it_is, (*_of_indices(like), *_of_setters(), *_through_views(like))),
    ]
    draw.shuffle(candidates)
    found = (candidate() for candidate in candidates)
    return list(itertools.islice((each for each in found if each is not None and _changes(each, like)), count))


def _as_it_is(write: Write) -> Candidate:
    return lambda: write


def _changes(write: Write, like: Tensor) -> bool:
    plain = like.clone()
    try:
        write.call(plain)
    except Exception:
        return False  # not with these arguments
    return plain.shape == like.shape and plain.dtype is like.dtype and not torch.equal(plain, like)


# -- operations whose schema says that they write ----------------------------------------------------------------------


def _of_schemas(like: Tensor) -> Iterator[Candidate]:
    schemas = {each.name.removeprefix("aten::") for each in torch._C._jit_get_all_schemas() if each.name[:4] == "aten"}
    for name in sorted(schemas):
        if (
            name.startswith(_OF_METADATA)
            or "empty" in name
            or (name.startswith("_") and not name.startswith("_foreach"))
        ):
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            function = getattr(packet, overload)
            written = [each for each in function._schema.arguments if each.alias_info and each.alias_info.is_write]
            if len(written) == 1 and str(written[0].type) in ("Tensor", "List[Tensor]"):
                yield partial(_of_function, function, written[0], like)


def _of_function(function: Any, written: Any, like: Tensor) -> Write | None:
    arguments = _arguments(function, written.name, like)
    if arguments is None:
        return None
    return Write(str(function), _call(function, arguments, written), _is_random(function))


def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _call(function: Any, arguments: dict[str, Any], written: Any) -> Callable[[Tensor], object]:
    is_list = str(written.type) == "List[Tensor]"
    return lambda tensor: function(**{**arguments, written.name: [tensor] if is_list else tensor})


def _arguments(function: Any, written: str, like: Tensor) -> dict[str, Any] | None:
    """Returns arguments, but for the one that is written, with which the operation changes a plain tensor."""
    needed = [each for each in function._schema.arguments if each.name != written and not each.has_default_value()]
    if any(each.type.kind() == "OptionalType" for each in needed) or len(needed) > 4:
        return None
    choices = [_values(each, like) for each in needed]
    for values in itertools.islice(itertools.product(*choices), 40):
        arguments = {each.name: value for each, value in zip(needed, values, strict=True)}
        schema = {each.name: each for each in function._schema.arguments}
        is_out = schema[written].is_out and str(schema[written].type) == "Tensor"
        if is_out and not _has_shape(function, {**arguments, written: like.new_empty(0)}, written, like):
            continue
        if _changes(Write("", _call(function, arguments, schema[written])), like):
            return arguments
    return None


def _has_shape(function: Any, arguments: dict[str, Any], written: str, like: Tensor) -> bool:
    """True if the result has the shape of ``like``: torch warns where it gives a tensor another one."""
    try:
        function(**arguments)
    except Exception:
        return False
    return bool(arguments[written].shape == like.shape)


def _values(argument: Any, like: Tensor) -> list[Any]:
    rows = torch.arange(like.shape[0])
    other = torch.full_like(like, 0.5)
    found: dict[str, list[Any]] = {
        "Tensor": [
            other,
            rows,
            torch.zeros(like.shape, dtype=torch.int64),
            like > 0,
            torch.tensor(0.5),
            other[0].clone(),
        ],
        "List[Tensor]": [[other], [rows], [torch.tensor(0.5)]],
        "number": [2],
        "List[number]": [[2]],
        "int": [0, 1],
        "float": [0.5],
        "bool": [True],
        "List[int]": [[0], list(like.shape)],
        "List[float]": [[0.5]],
    }
    return found.get(str(argument.type), [])


# -- indices and setters -----------------------------------------------------------------------------------------------


def _of_indices(like: Tensor) -> Iterator[Write]:
    indices: dict[str, Any] = {
        "0": 0,
        "-1": -1,
        "1:": slice(1, None),
        "::2": slice(None, None, 2),
        "..., 1": (..., 1),
        ":, None, 1": (slice(None), None, 1),
        "[0, 2]": [0, 2],
        "tensor": torch.tensor([1, 2]),
        "pairs": (torch.tensor([0, 1]), torch.tensor([1, 0])),
        "mask": like > 0,
        "mask of rows": torch.arange(like.shape[0]) % 2 == 0,
        "...": ...,
    }
    for name, index in indices.items():
        yield Write(f"[{name}] = number", lambda tensor, index=index: tensor.__setitem__(index, 0.25))  # type: ignore[misc]
        yield Write(f"[{name}] += 1", lambda tensor, index=index: _added(tensor, index))  # type: ignore[misc]


def _added(tensor: Tensor, index: Any) -> None:
    tensor[index] += 1


def _set_data(tensor: Tensor) -> None:
    tensor.data = tensor.detach().clone() + 1


def _of_setters() -> Iterator[Write]:
    yield Write(".data = tensor", _set_data)
    yield Write(".data.add_()", lambda tensor: tensor.data.add_(1))
    yield Write(".data[0] = number", lambda tensor: tensor.data.__setitem__(0, 0.25))
    yield Write("iadd", lambda tensor: tensor.__iadd__(1))
    yield Write("ipow", lambda tensor: tensor.__ipow__(2))
    yield Write("nn.init", torch.nn.init.ones_)
    yield Write(
        "map_", lambda tensor: tensor.map_(torch.ones(tensor.shape, dtype=tensor.dtype), lambda one, two: one + two)
    )
    yield Write("apply_", lambda tensor: tensor.apply_(lambda value: value + 1))


# -- through views -----------------------------------------------------------------------------------------------------


def _through_views(like: Tensor) -> Iterator[Write]:
    rows, columns = like.shape
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "select": lambda tensor: tensor.select(0, 1),
        "narrow": lambda tensor: tensor.narrow(1, 1, 2),
        "t": lambda tensor: tensor.t(),
        "T": lambda tensor: tensor.T,
        "mT": lambda tensor: tensor.mT,
        "transpose": lambda tensor: tensor.transpose(0, 1),
        "permute": lambda tensor: tensor.permute(1, 0),
        "movedim": lambda tensor: tensor.movedim(0, 1),
        "view": lambda tensor: tensor.view(-1),
        "view_as": lambda tensor: tensor.view_as(torch.empty(1, rows, columns)),
        "view of bits": lambda tensor: tensor.view(torch.int32 if like.itemsize == 4 else torch.int16),
        "reshape": lambda tensor: tensor.reshape(columns, rows),
        "flatten": lambda tensor: tensor.flatten(),
        "ravel": lambda tensor: tensor.ravel(),
        "unsqueeze": lambda tensor: tensor.unsqueeze(0),
        "squeeze": lambda tensor: tensor.squeeze(),
        "expand": lambda tensor: tensor.expand(rows, columns),
        "diagonal": lambda tensor: tensor.diagonal(),
        "unfold": lambda tensor: tensor.unfold(0, 2, 2),
        "as_strided": lambda tensor: tensor.as_strided((2, 2), (1, 2)),
        "unbind": lambda tensor: tensor.unbind()[1],
        "split": lambda tensor: tensor.split(2)[0],
        "chunk": lambda tensor: tensor.chunk(2, 1)[1],
        "tensor_split": lambda tensor: tensor.tensor_split(2)[1],
        "hsplit": lambda tensor: tensor.hsplit([1])[1],
        "detach": lambda tensor: tensor.detach(),
        "alias": lambda tensor: torch.ops.aten.alias(tensor),
        "[1:, ::2]": lambda tensor: tensor[1:, ::2],
        "iteration": lambda tensor: next(iter(tensor)),
        "of a view": lambda tensor: tensor.t()[1:].unbind()[0],
    }
    for name, view in views.items():
        yield Write(f"{name}, zero_()", lambda tensor, view=view: view(tensor).zero_())  # type: ignore[misc]
        yield Write(f"{name}, [...] = number", lambda tensor, view=view: view(tensor).__setitem__(..., 1))  # type: ignore[misc]
        yield Write(f"{name}, foreach", lambda tensor, view=view: torch._foreach_zero_([view(tensor)]))  # type: ignore[misc]
        yield Write(f"{name}, out=", lambda tensor, view=view: _out_of(view(tensor)))  # type: ignore[misc]


def _out_of(view: Tensor) -> None:
    ones = torch.ones(view.shape, dtype=view.dtype)
    torch.add(ones, ones, out=view)
