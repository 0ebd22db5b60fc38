"""``python -m shardopt plan``: the table and the chart."""

from collections.abc import Sequence
from pathlib import Path

from .plan import KINDS, Need

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """``80G`` (10^9), ``80Gi`` (2^30), ``7e9``.

    Raises:
        ValueError: it is neither.
    """
    plain = text.strip().removesuffix("B")
    binary = plain.endswith("i")
    plain = plain.removesuffix("i")
    unit = plain[-1:].upper() if plain[-1:].upper() in _UNITS and plain[-1:] else ""
    factor = 2 ** (10 * list(_UNITS).index(unit)) if binary else _UNITS[unit]
    return int(float(plain[: len(plain) - len(unit)]) * factor)


def table(needs: Sequence[Need], numel: int, device_bytes: int | None) -> str:
    """One row a way, GB (10^9 bytes)."""
    head = ["way", *KINDS, "total", "a param", "formula", "moved a step", "fits"]
    rows = [head]
    for need in needs:
        sizes = [_gigabytes(need.bytes[kind]) for kind in KINDS]
        fits = "" if device_bytes is None else "yes" if need.total <= device_bytes else "no"
        total = _gigabytes(need.total)
        a_param = f"{need.total / numel:.2f}"
        rows.append([str(need.way), *sizes, total, a_param, need.formula, _gigabytes(need.moved), fits])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _gigabytes(nbytes: int) -> str:
    return "-" if not nbytes else f"{nbytes / 1e9:.2f}" if nbytes >= 10**7 else f"{nbytes / 1e9:.1e}"


def chart(needs: Sequence[Need], device_bytes: int | None, path: Path) -> None:
    """Stacked bars into ``path`` (.png, .svg, .pdf); needs matplotlib (the extra "plots")."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(needs) + 1.5), layout="constrained")
    axes = figure.subplots()
    names = [str(need.way) for need in needs]
    starts = [0.0] * len(needs)
    for kind in KINDS:
        sizes = [need.bytes[kind] / 1e9 for need in needs]
        if any(sizes):
            axes.barh(names, sizes, left=starts, label=kind)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    if device_bytes is not None:
        axes.axvline(device_bytes / 1e9, color="black", linestyle="--", label="device")
    axes.invert_yaxis()
    axes.set_xlabel("GB on a rank")
    axes.legend()
    figure.savefig(path)
