"""Options as fields of dataclasses. A field has all of an option: default, meaning, check, comparison, planner's flag.

::

    @dataclass(frozen=True)
    class Tuning:
        seed: int = option(0, "of stochastic rounding", partial(whole, least=0))

        def __post_init__(self) -> None:
            check_fields(self, "Tuning.")

The fields are the only list of options. The dataclass checks its values by them, ranks compare them (:func:`compared`),
the planner and its command line take those with a :class:`Flag`, and ``scripts/options.py`` writes the tables of the
documentation from them.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import torch

from .arguments import set_frozen

Value = TypeVar("Value")
Check = Callable[[Any, str], Any]
"""(given value, its name for messages) -> the value that is kept, in Python's own types."""


class Flag(NamedTuple):
    """How the planner and its command line take an option."""

    help: str
    label: str  # in the planner's table, for a way that has the option
    value: Any = True  # the value of the bare flag; unused if the field's type lists choices


class Option(NamedTuple):
    """What a field holds beside its name, type and default."""

    meaning: str  # one line of Markdown, for the tables of the documentation
    check: Check
    compared: Callable[[Any], Any] | None
    local: str  # why ranks may differ in it; empty if they must not
    flag: Flag | None


def option(
    default: Value,
    meaning: str,
    check: Check,
    *,
    compared: Callable[[Any], Any] | None = None,
    local: str = "",
    flag: Flag | None = None,
) -> Value:
    """Returns a field of a frozen dataclass of options.

    Args:
        check: checks a value; None is not checked if it is the default.
        compared: converts a value that is not None to what ranks compare; without it they compare the value itself.
        local: why ranks may differ in the option. Without a reason they must agree.
        flag: for an option that the planner takes.
    """
    made = Option(meaning, check, compared, local, flag)
    return dataclasses.field(default=default, metadata={"option": made})


def options_of(options: Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """Returns the fields of a dataclass of options, or of an instance, in order."""
    return ((each, each.metadata["option"]) for each in dataclasses.fields(options))


def in_words(about: Option) -> str:
    """Returns the meaning without Markdown's links: a sentence for a docstring, without its full stop."""
    plain = re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)", lambda found: found[1] or "", about.meaning)
    return plain[0].upper() + plain[1:].replace("`", "``")


def keywords_in_words(options: Any) -> str:
    """Returns all fields with their defaults and meanings, for the docstring of a function with these keywords."""
    lines = [f"{default_in_words(field)}: {in_words(about)}." for field, about in options_of(options)]
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)


def default_in_words(field: "dataclasses.Field[Any]") -> str:
    """Returns ``stage=1``, as in a signature; of nested options only the class."""
    default = field.default
    return f"{field.name}=" + (f"{type(default).__name__}()" if dataclasses.is_dataclass(default) else repr(default))


def given_in_words(options: Any, besides: Sequence[str] = ()) -> list[str]:
    """Returns ``name=value`` for each field that differs from its default; nested options likewise."""
    found = []
    for field, _ in options_of(options):
        value = getattr(options, field.name)
        if field.name not in besides and value != field.default:
            inner = dataclasses.is_dataclass(value) and not isinstance(value, type)
            shown = f"{type(value).__name__}({', '.join(given_in_words(value))})" if inner else repr(value)
            found.append(f"{field.name}={shown}")
    return found


def check_fields(instance: Any, prefix: str = "") -> None:
    """Checks each field of a frozen dataclass, and keeps what the check returns.

    Raises:
        TypeError, ValueError: from the check, which names the field, with ``prefix``.
    """
    for field, about in options_of(instance):
        value = getattr(instance, field.name)
        if value is not None or field.default is not None:
            set_frozen(instance, {field.name: about.check(value, f"{prefix}{field.name}")})


def compared(options: Any) -> dict[str, Any]:
    """Returns all options that ranks must agree on, as JSON."""
    return {
        field.name: _as_json(getattr(options, field.name), about.compared)
        for field, about in options_of(options)
        if not about.local
    }


def _as_json(value: Any, reduced: Callable[[Any], Any] | None = None) -> Any:
    if reduced is not None and value is not None:
        value = reduced(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):  # sorted: the order of keys has no meaning
        return {key: _as_json(value[key]) for key in sorted(value)}
    if isinstance(value, tuple | list):
        return list(map(_as_json, value))
    return compared(value)  # options in an option


def planned(options: Any) -> Iterator[tuple[dataclasses.Field[Any], Flag]]:
    """Returns the options that the planner and its command line take: those with a flag."""
    return ((field, about.flag) for field, about in options_of(options) if about.flag is not None)


def choices_of(kind: Any) -> tuple[str, ...]:
    """Returns the strings that a Literal lists, itself or in a union."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := choices_of(part))), ())
