"""Reports of ``shardopt plan``: the table, the chart, the cheapest way, data for ``--json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .need import KINDS, cheapest, cost, fits
from .text_table import aligned
from .ways import TIERS, possible

if TYPE_CHECKING:
    from .cut import Cut
    from .need import Need
    from .ways import Way

_HATCHES = {"device": None, "host": "//", "disk": "xx"}


def table(needs: Sequence[Need], numel: int, device_bytes: int | None, host_bytes: int | None = None) -> str:
    """Returns a table with one row a way, in GB (10^9 bytes), without empty columns."""
    kinds = [kind for kind in KINDS if any(need.bytes[kind].get("device") for need in needs)]
    head = ["way", *kinds, "device", "host", "disk", "a param", "formula", "wire a step", "whole matrices"]
    head += ["bus", "disk I/O", "fits"]
    rows = [head]
    for need in needs:
        sizes = [*(need.bytes[kind].get("device", 0) for kind in kinds), *map(need.on, TIERS)]
        a_param = f"{sum(map(need.on, TIERS)) / numel:.2f}"
        wire, *moved = [_gigabytes(need.moved[way]) for way in ("wire", "bus", "disk")]
        whole = str(need.matrices) if need.matrices.matrices else ""
        enough = "" if device_bytes is None else "yes" if fits(need, device_bytes, host_bytes) else "no"
        rows.append([str(need.way), *map(_gigabytes, sizes), a_param, need.formula, wire, whole, *moved, enough])
    shown = [column for column in range(len(head)) if any(row[column] not in ("", "-") for row in rows[1:])]
    return aligned([[row[column] for column in shown] for row in rows])


def call(optimizer: str, way: Way, cut: Cut) -> str:
    """Returns the line of code that makes an optimizer of this way."""
    keywords = [f"stage={way.stage}"]
    keywords += ["process_group=mesh['dp'].get_group()"] * (cut.tensor * cut.pipeline > 1)
    keywords += ["norm_group=dist.group.WORLD"] * (cut.pipeline > 1)
    keywords += [f"{name}={value!r}" for name, value in possible(way).options.items()]
    keywords += [f"compute_dtype={way.compute_dtype}"] * (way.compute_dtype is not None)
    offload = repr("cpu" if way.tier == "host" else "/a/directory")
    rare = ["gradients='cpu'"] * way.sums_rest + [f"fraction={way.fraction:g}"] * (way.fraction < 1)
    rare += [f"early_bytes={way.early_bytes}"] * bool(way.early_bytes)
    offload = f"Offload({', '.join([offload, *rare])})" if rare else offload
    keywords += [f"offload={offload}"] * (way.tier != "device")
    given = "model" if way.has_module else "model.parameters()"
    if cut.experts > 1:  # experts have a process_group of their own
        given = "groups, module=model" if way.has_module else "groups"
    return f"Sharded{optimizer}({given}, {', '.join(keywords)})"


def found(needs: Sequence[Need], device_bytes: int, host_bytes: int | None = None) -> dict[str, Need]:
    """Returns by title the cheapest way that fits, and a cheaper one with less precision, if there is one."""
    best = cheapest(needs, device_bytes, host_bytes)
    if best is None:
        return {}
    coarse = cheapest([need for need in needs if not need.way.is_exact], device_bytes, host_bytes)
    if best.way.is_exact and coarse is not None and cost(coarse) < cost(best):
        return {"cheapest that fits": best, "with less precision": coarse}
    return {"cheapest that fits": best}


def in_words(best: Mapping[str, Need], needs: Sequence[Need], optimizer: str, device_bytes: int) -> str:
    """Returns the ways that :func:`found` returned, as text, each with the line of code that makes it."""
    if best:
        return "\n".join(_line(title, need, optimizer, device_bytes) for title, need in best.items())
    least = min(needs, key=lambda need: need.on("device"))
    rest = f" and {least.on('host') / 1e9:.1f} GB of the host's" if least.on("host") else ""
    return (
        f"none fits: {least.way} needs least, {least.on('device') / 1e9:.1f} GB of the device{rest}. Take more ranks "
        "or larger devices."
    )


def as_data(need: Need, optimizer: str, device_bytes: int | None, host_bytes: int | None = None) -> dict[str, Any]:
    """Returns one way for ``--json``: bytes, and the line of code that makes it."""
    return {
        "way": str(need.way),
        "call": call(optimizer, need.way, need.cut),
        "formula": need.formula,
        "bytes": need.bytes,
        "moved": need.moved,
        "wire": need.wire,
        "matrices": asdict(need.matrices),
        **{tier: need.on(tier) for tier in TIERS},
        "fits": None if device_bytes is None else fits(need, device_bytes, host_bytes),
    }


def _line(title: str, need: Need, optimizer: str, device_bytes: int) -> str:
    left = (device_bytes - need.on("device")) / 1e9
    cast = "    model.bfloat16()\n" if need.way.dtype is torch.bfloat16 else ""
    made = call(optimizer, need.way, need.cut)
    return f"{title}: {need.way}; it leaves {left:.1f} GB for activations\n{cast}    {made}"


def _gigabytes(nbytes: int) -> str:
    return "-" if not nbytes else f"{nbytes / 1e9:.2f}" if nbytes >= 10**7 else f"{nbytes / 1e9:.1e}"


def chart(needs: Sequence[Need], device_bytes: int | None, path: Path) -> None:
    """Draws stacked bars into ``path`` (.png, .svg, .pdf), other tiers hatched; needs matplotlib (extra "plots")."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(needs) + 1.5), layout="constrained")
    axes = figure.subplots()
    names, starts = [str(need.way) for need in needs], [0.0] * len(needs)
    for tier in TIERS:
        for index, kind in enumerate(KINDS):
            sizes = [need.bytes[kind].get(tier, 0) / 1e9 for need in needs]
            if any(sizes):
                label, alpha = (kind, 1.0) if tier == "device" else (f"{kind}, {tier}", 0.4)
                axes.barh(names, sizes, left=starts, label=label, alpha=alpha, color=f"C{index}", hatch=_HATCHES[tier])
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    if device_bytes is not None:
        axes.axvline(device_bytes / 1e9, color="black", linestyle="--", label="device memory")
    axes.invert_yaxis()
    axes.set_xlabel("GB of a rank")
    figure.legend(loc="outside right upper")  # the best place inside takes seconds to find among hundreds of bars
    figure.savefig(path)
