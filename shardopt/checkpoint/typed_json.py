"""Frozen dataclasses as JSON: written, read and checked by the types of their fields.

::

    @dataclass(frozen=True, kw_only=True)
    class GroupInfo:
        params: Names
        values: Encoded

    from_json(GroupInfo, {"params": ["0.weight"], "values": {"lr": 0.1}}, "optimizers.0.groups.0")

The fields are the only list of what a record holds, in the order of the file. A type is a dataclass, a NamedTuple (in
JSON the list of its fields), a ``dict`` or ``tuple`` of such types, one of them or None, or an ``Annotated`` type with
a :class:`Kind`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch

from ..errors import CheckpointError

if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
else:
    Json = object  # a type that holds itself has no form at run time, where the hints of fields are read
Record = TypeVar("Record")
_MOST_DIMENSIONS = 64  # of a tensor of torch's


class Kind(NamedTuple):
    """How values of one type are read from JSON and written to it.

    Attributes:
        words: what belongs there, for the error.
        read: raises :class:`Misfit` for JSON that no value of this kind is written as.
    """

    words: str
    read: Callable[[object], Any]
    write: Callable[[Any], Json]


class Misfit(Exception):
    """A value in JSON is not of the kind that belongs there; ``path`` leads to it."""

    def __init__(self, found: object, expected: str):
        super().__init__(expected)
        self.found, self.expected, self.path = found, expected, ""

    def within(self, key: object) -> Misfit:
        self.path = f"{key}.{self.path}" if self.path else str(key)
        return self


def from_json(kind: type[Record], value: object, where: str = "") -> Record:
    """Returns the record that ``value`` describes; keys that are no field are ignored: a later version may add some.

    Args:
        kind: a dataclass, or another type of which the module's docstring tells.
        where: the place of ``value`` in the manifest, for the error.

    Raises:
        CheckpointError: a field is missing or of another kind; the message names it.
    """
    annotation: Any = kind
    try:
        found: Record = kind_of(annotation).read(value)
    except Misfit as error:
        raise refusal(".".join(filter(None, (where, error.path))), error.found, error.expected) from None
    return found


def to_json(value: object, kind: object = None) -> Any:
    """Returns a record as JSON; ``kind``: its type, if that is not a dataclass."""
    return kind_of(type(value) if kind is None else kind).write(value)


def refusal(where: str, found: object, expected: str) -> CheckpointError:
    """Returns the error for a manifest that says what shardopt cannot have written."""
    shown = repr(found) if isinstance(found, str | int | float | torch.dtype | None) else type(found).__name__
    if isinstance(found, tuple | list):
        shown = repr(list(found[:8]))
    return CheckpointError(
        f"load another checkpoint: the manifest says {where[:200]} = {shown[:200]}, where {expected} belongs, so "
        "shardopt did not write it, and nothing was loaded. If no file was changed, this is a bug in shardopt."
    )


# -- fields of records -------------------------------------------------------------------------------------------------


def omitted(default: Any) -> Any:
    """Returns a field that is not written while it has its default."""
    return dataclasses.field(default=default, metadata={omitted: True})


def renamed(key: str) -> Any:
    """Returns a field that has another name in JSON."""
    return dataclasses.field(metadata={renamed: key})


# -- kinds -------------------------------------------------------------------------------------------------------------


def plain(words: str, holds: Callable[[Any], bool]) -> Kind:
    """Returns the kind of values that are JSON themselves, if ``holds`` is true of them."""

    def read(value: object) -> object:
        if not holds(value):
            raise Misfit(value, words)
        return value

    return Kind(words, read, lambda value: value)


def converted(words: str, read: Callable[[Any], object], write: Callable[[Any], Json]) -> Kind:
    """Returns the kind of values that JSON has in another form; ``read`` raises any usual error for what is none."""

    def checked(value: object) -> object:
        try:
            return read(value)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise Misfit(value, words) from error

    return Kind(words, checked, write)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _read_shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS or not all(map(is_count, value)):
        raise ValueError(f"{value!r} is not a shape")
    return tuple(value)


def _read_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("not a list of names")
    return tuple(value)


Count = Annotated[int, plain("a count", is_count)]
Above0 = Annotated[int, plain("a number of ranks", lambda value: is_count(value) and value > 0)]
HexFloat = Annotated[float, converted("a number in hexadecimal digits", float.fromhex, float.hex)]
Names = Annotated[tuple[str, ...], converted("a list of names", _read_names, list)]
Shape = Annotated[tuple[int, ...], converted("a shape", _read_shape, list)]
Encoded = Annotated[Mapping[str, Json], plain("an object", lambda value: isinstance(value, Mapping))]
"""What ``values.encode`` made of a dict; ``schema.py`` checks what is in it."""

_LEAVES: Mapping[object, Kind] = {
    str: plain("a text", lambda value: isinstance(value, str)),
    bool: plain("true or false", lambda value: type(value) is bool),
}


@cache
def kind_of(annotation: Any) -> Kind:
    """Returns the kind of a type, by which its values are read and written."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next(each for each in arguments if isinstance(each, Kind))
    if origin is UnionType or NoneType in arguments:
        (kind,) = (kind_of(each) for each in arguments if each is not NoneType)
        return _or_none(kind)
    if origin is tuple:
        return _tuple(kind_of(arguments[0]))
    if origin is dict:
        return _dict(kind_of(arguments[1]))
    if dataclasses.is_dataclass(annotation):
        return _record(annotation)
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    return in_order(annotation, get_type_hints(annotation, include_extras=True))


def in_order(make: Callable[..., object], hints: Mapping[str, Any]) -> Kind:
    """Returns the kind of a record that JSON has as the list of its fields, of which ``hints`` are the types."""
    words, kinds = f"a list of {', '.join(hints)}", [kind_of(each) for each in hints.values()]

    def read(value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise Misfit(value, words)
        return make(*(_read_at(kind, name, each) for name, kind, each in zip(hints, kinds, value, strict=True)))

    def write(record: object) -> Json:
        return [kind.write(getattr(record, name)) for name, kind in zip(hints, kinds, strict=True)]

    return Kind(words, read, write)


def _or_none(kind: Kind) -> Kind:
    return Kind(
        kind.words,
        lambda value: None if value is None else kind.read(value),
        lambda value: None if value is None else kind.write(value),
    )


def _tuple(kind: Kind) -> Kind:
    def read(value: object) -> object:
        if not isinstance(value, list | tuple):
            raise Misfit(value, "a list")
        return tuple(_read_at(kind, index, each) for index, each in enumerate(value))

    return Kind("a list", read, lambda value: [kind.write(each) for each in value])


def _dict(kind: Kind) -> Kind:
    def read(value: object) -> object:
        return {key: _read_at(kind, key, each) for key, each in _object(value).items()}

    return Kind("an object", read, lambda value: {key: kind.write(each) for key, each in value.items()})


def _record(annotation: Any) -> Kind:
    hints, fields = get_type_hints(annotation, include_extras=True), dataclasses.fields(annotation)
    kinds = {each.name: kind_of(hints[each.name]) for each in fields}

    def read(value: object) -> object:
        given, of = {}, _object(value)
        for each in fields:
            key = each.metadata.get(renamed, each.name)
            if key in of:
                given[each.name] = _read_at(kinds[each.name], key, of[key])
            elif each.default is dataclasses.MISSING:
                raise Misfit(None, kinds[each.name].words).within(key)
        return annotation(**given)

    def write(record: object) -> Json:
        return {
            each.metadata.get(renamed, each.name): kinds[each.name].write(value)
            for each in fields
            if (value := getattr(record, each.name)) != each.default or omitted not in each.metadata
        }

    return Kind("an object", read, write)


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise Misfit(value, "an object")
    return value


def _read_at(kind: Kind, key: object, value: object) -> Any:
    try:
        return kind.read(value)
    except Misfit as error:
        raise error.within(key) from None
