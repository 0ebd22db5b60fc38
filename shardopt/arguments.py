"""Reads what users give: one place says what counts as a number, a flag, a word, a path, and what the error is.

A number is an int or float, a NumPy scalar or a tensor of one element: config files, sweeps and schedulers hand over
any of them. A bool is not a number, NaN is never one, and text is never read as either. What comes back is Python's own
type, so that ranks compare it and files hold it.
"""

import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

Chosen = TypeVar("Chosen", bound=str)


def number(
    value: object,
    what: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    or_none: str = "",
) -> float:
    """A float in this range, infinite where the range is.

    Args:
        what: the argument's name, for the message.
        or_none: what None would mean, for the message, where it is allowed.

    Raises:
        TypeError: no number.
        ValueError: NaN, or out of range.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1:  # in the words of torch's classes
        raise ValueError(f"Tensor {what} must be 1-element, found a shape of {tuple(value.shape)}.")
    found = _plain(value)
    must = f"{what} must be {_range('a number', above, least, below, most)}{or_none}, found {_shown(value)}."
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(must)
    is_open = (above == -math.inf or found > above) and (below == math.inf or found < below)
    if not (is_open and least <= found <= most):  # NaN is in no range
        raise ValueError(must)
    try:
        return float(found)
    except OverflowError:  # an int of hundreds of digits
        raise ValueError(must) from None


def whole(value: object, what: str, *, least: int, most: int = 2**63 - 1, or_none: str = "") -> int:
    """An int in this range; a float that is a whole number (``25e6``) counts as one.

    Raises:
        TypeError: no number.
        ValueError: a fraction, NaN, or out of range.
    """
    found = _plain(value)
    # Where the range is that of 64 bits its end says nothing.
    end = math.inf if most == 2**63 - 1 else most
    must = (
        f"{what} must be {_range('a whole number', -math.inf, least, math.inf, end)}{or_none}, found {_shown(value)}."
    )
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(must)
    if not least <= found <= most or found != int(found):
        raise ValueError(must)
    return int(found)


def flag(value: object, what: str, or_none: str = "") -> bool:
    """A bool; 0 and 1 count as one, text never does: "no" would be true.

    Raises:
        TypeError: anything else.
    """
    found = _plain(value)
    if not isinstance(found, bool | int) or found not in (0, 1):
        raise TypeError(f"{what} takes True or False{or_none}, found {_shown(value)}.")
    return bool(found)


def word(value: object, what: str, choices: Sequence[Chosen], or_none: str = "") -> Chosen:
    """One of ``choices``.

    Raises:
        ValueError: anything else.
    """
    for each in choices:
        if isinstance(value, str) and value == each:
            return each
    *others, last = map(repr, choices)
    listed = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(f"{what} must be {listed}{or_none}, found {_shown(value)}.")


def texts(value: object, what: str, example: str) -> tuple[str, ...]:
    """Several texts; one alone is not taken for its letters.

    Raises:
        TypeError: anything else.
    """
    is_several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    found = tuple(value) if is_several and isinstance(value, Iterable) else None
    if found is None or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{what} takes several texts, as {what.rpartition('.')[2]}={example}, found {_shown(value)}.")
    return found


def parts_of_model(value: object, what: str) -> tuple[Any, ...]:
    """Several module classes, modules and patterns of module names.

    Raises:
        TypeError: anything else.
    """
    is_several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | torch.nn.Module)
    found = tuple(value) if is_several and isinstance(value, Iterable) else None
    if found is None or not all(
        isinstance(each, str | torch.nn.Module) or (isinstance(each, type) and issubclass(each, torch.nn.Module))
        for each in found
    ):
        raise TypeError(
            f"{what} takes several module classes, modules or patterns of names, as "
            f'{what.rpartition(".")[2]}=(Block, "encoder.*"), found {_shown(value)}.'
        )
    return found


def mapping(value: object, what: str, example: str) -> dict[Any, Any]:
    """A dict of what is given; empty for None.

    Raises:
        TypeError: it is not a mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{what} takes a dict, as {example}, or None, found {_shown(value)}.")
    return dict(value or {})


def by_name(value: object, what: str) -> Mapping[str, Any]:
    """Values by name, as ``state_dict()`` has them; none is read here, so that a file may be behind them.

    Raises:
        TypeError: it is not a mapping, or a key is not text.
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{what} takes tensors by name, as module.state_dict() has them, found {_shown(value)}.")
    return value


def path(value: object, what: str) -> str:
    """A path as text, not empty: an empty one is the working directory, wherever the script runs.

    Raises:
        TypeError: no path.
        ValueError: an empty one.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{what} takes a path, found {_shown(value)}.")
    if not text or "\0" in text:
        raise ValueError(f"{what} takes the path of a directory, found {text!r}: give '.' for the working directory.")
    return text


def plain(value: object) -> object:
    """NumPy's scalars and arrays of no dimension as Python's numbers; everything else as it is."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value


def set_frozen(instance: object, values: Mapping[str, object]) -> None:
    """Puts into a frozen dataclass what it was given, in Python's own types."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _plain(value: object) -> Any:
    """The Python number behind ``value``, if there is one."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta and not value.is_complex() else None
    value = plain(value)
    if isinstance(value, bool | int | float) or not isinstance(value, numbers.Real):
        return value
    return float(value)  # a fraction


def _range(kind: str, above: float, least: float, below: float, most: float) -> str:
    ends = [f"above {above:g}"] * (above != -math.inf) + [f"at least {least:g}"] * (least != -math.inf)
    ends += [f"below {below:g}"] * (below != math.inf) + [f"at most {most:g}"] * (most != math.inf)
    return f"{kind} {' and '.join(ends)}" if ends else kind


def _shown(value: object) -> str:
    """Its repr, on one line and short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
