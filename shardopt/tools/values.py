"""Functions for argparse's ``type=``: each converts one kind of argument, or raises what the command takes."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

_THOUSANDS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_COUNTS = {**_THOUSANDS, "B": 10**9}  # billion
LEAST_PARAMS, MOST_PARAMS = 10**3, 10**15
_CHARTS = (".png", ".svg", ".pdf")


def parse_size(text: str) -> int:
    """Returns bytes: of ``80G`` (10^9), ``80Gi`` (2^30), ``80GiB``, ``7e9``.

    Raises:
        ValueError: the text is not a size, not finite, or negative.
    """
    plain = text.strip().removesuffix("B")
    binary = plain.endswith("i")
    plain = plain.removesuffix("i")
    unit = plain[-1:].upper()
    power = list(_THOUSANDS).index(unit) + 1 if unit in _THOUSANDS else 0
    if binary and not power:
        raise ValueError(f"{text!r} is not a size: write 80G, 80GiB or 8e10.")
    factor = 2 ** (10 * power) if binary else 10 ** (3 * power)
    return _scaled(plain[:-1] if power else plain, factor, text, "size: write 80G, 80GiB or 8e10.")


def parse_count(text: str) -> int:
    """Returns a count: ``7B``, ``7e9`` and ``7000M`` are seven billion.

    Raises:
        ValueError: the text is not a count, not finite, or negative.
    """
    plain = text.strip()
    factor = _COUNTS.get(plain[-1:].upper(), 1)
    return _scaled(plain[:-1] if factor > 1 else plain, factor, text, "count: write 7B, 350M or 7e9.")


def _scaled(number: str, factor: int, text: str, wanted: str) -> int:
    try:
        value = float(number) * factor
    except (ValueError, OverflowError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} is not a {wanted}")
    return round(value)


def _parsed(parse: Callable[[str], int], text: str) -> int:
    """Parses for argparse, which shows only the message of its own error."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory(text: str) -> int:
    """Returns bytes, at least one."""
    found = _parsed(parse_size, text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size: omit it for any.")
    return found


def params(text: str) -> int:
    """Returns a number of params that can be planned."""
    found = _parsed(parse_count, text)
    if found < LEAST_PARAMS:
        raise argparse.ArgumentTypeError(
            f"write 7B or 7e9 for seven billion: {text!r} is a model of {found} params, and fewer than "
            f"{LEAST_PARAMS:,} fit anywhere."
        )
    if found > MOST_PARAMS:
        raise argparse.ArgumentTypeError(
            f"give at most 10^15 params: {text!r} is more, and laying out every layer would not end."
        )
    return found


def positive(text: str) -> int:
    """Returns an int from 1 to 2^31 - 1."""
    return _whole(text, 1, 2**31 - 1)


def index(text: str) -> int:
    """Returns an int from 0 to 2^31 - 1."""
    return _whole(text, 0, 2**31 - 1)


def seed(text: str) -> int:
    """Returns an int from 0 to 2^63 - 1."""
    return _whole(text, 0, 2**63 - 1)


def _whole(text: str, least: int, most: int) -> int:
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return found


def chart_file(text: str) -> Path:
    """Returns the path of a file for a chart, in a directory that exists."""
    path = Path(text)
    if path.suffix.lower() not in _CHARTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {', '.join(_CHARTS[:-1])} or {_CHARTS[-1]} file")
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no directory {str(path.parent)!r}")
    return path
