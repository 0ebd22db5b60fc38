"""Statistics of all gradients at once, as tools that watch a model ask for: one all-reduce for all params together.

Each rank measures its slices, in fp64, and fills in the row of each piece (the part of one param that lies in one
shard), as in :mod:`.gradient_report`. The sum over ranks is every piece's row on all ranks, which put them together in
one order: all ranks get the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..domain.agreement import agree_on_call
from ..kernels.tables import sent

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from .round_gradients import RoundGradients
    from .rounds import Rounds

    Array = np.ndarray[Any, Any]

_ADDING = "adding up statistics of gradients"
# Of a piece: elements, sum, sum of magnitudes, of squares, of squared distances from the piece's mean, least and
# greatest element, zeros, and elements that are Inf or NaN.
_COUNT, _SUM, _MAGNITUDES, _SQUARES, _SPREAD, _LEAST, _GREATEST, _ZEROS, _NONFINITE, _COLUMNS = range(10)


def _variance(rows: Array) -> float:
    count, mean = rows[:, _COUNT].sum(), math.fsum(rows[:, _SUM]) / rows[:, _COUNT].sum()
    between = [each[_COUNT] * (each[_SUM] / each[_COUNT] - mean) ** 2 for each in rows]
    return math.fsum([*rows[:, _SPREAD], *between]) / (count - 1) if count > 1 else math.nan


STATISTICS: dict[str, Callable[[Array], float]] = {
    "sum": lambda rows: math.fsum(rows[:, _SUM]),
    "mean": lambda rows: math.fsum(rows[:, _SUM]) / rows[:, _COUNT].sum(),
    "absmean": lambda rows: math.fsum(rows[:, _MAGNITUDES]) / rows[:, _COUNT].sum(),
    "min": lambda rows: rows[:, _LEAST].min(),
    "max": lambda rows: rows[:, _GREATEST].max(),
    "absmax": lambda rows: np.abs(rows[:, [_LEAST, _GREATEST]]).max(),
    "var": _variance,
    "std": lambda rows: math.sqrt(_variance(rows)),
    "norm": lambda rows: math.sqrt(math.fsum(rows[:, _SQUARES])),
    "zeros": lambda rows: rows[:, _ZEROS].sum(),
    "nonfinite": lambda rows: rows[:, _NONFINITE].sum(),
}


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError if one of them is no statistic."""
    unknown = [name for name in names if not isinstance(name, str) or name not in STATISTICS]
    if unknown or not names:
        raise ValueError(
            f"gradient_statistics(*names): ask for some of {', '.join(map(repr, STATISTICS))}, found "
            f"{unknown[0] if unknown else 'no name'!r}: nothing was asked."
        )


def statistics_of(gradients: RoundGradients, rounds: Rounds, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Collective: returns the statistics of the mean gradient of each param that has one, by the param's name.

    Raises:
        ValueError: a name is no statistic; on this rank, a DisagreementError on the others.
        ShardoptError: gradients were reduced in part only.
        DisagreementError: ranks ask for other ones.
    """

    def check() -> dict[str, Any]:
        check_names(names)
        rounds.check_whole()
        return {"statistics": list(names)}

    domain, entries, layout = gradients.domain, gradients.entries, gradients.layout
    agree_on_call("gradient_statistics()", check, domain.mesh.world)
    shown = gradients.held
    rows = np.zeros((layout.num_pieces, _COLUMNS))
    if domain.mesh.world.rank in domain.mesh.one_copy:
        piece_of = dict(zip(layout.own_params.tolist(), layout.own_pieces.tolist(), strict=True))
        own = [number for number in shown if number in piece_of]
        measured = [_measured(_slice(entries[number]).lend()) for number in own]
        if measured:
            rows[[piece_of[number] for number in own]] = torch.stack(measured).cpu().numpy()
    rows = _everyones(domain, rows)
    found = {}
    last = np.append(layout.first_piece[1:], layout.num_pieces)
    for number in shown:
        entry, pieces = entries[number], rows[layout.first_piece[number] : last[number]]
        if pieces[:, _COUNT].any():
            name = domain.name_of(entry.param) or entry.name
            with np.errstate(all="ignore"):
                found[name] = {each: _number(STATISTICS[each], pieces[pieces[:, _COUNT] > 0]) for each in names}
    return found


def _number(statistic: Callable[[Array], float], rows: Array) -> float:
    try:
        return float(statistic(rows))
    except (ValueError, OverflowError):  # fsum() takes no Inf beside -Inf
        return math.nan


def _slice(entry: ParamRecord) -> Any:
    return entry.gradient_slice


def _measured(mean: Tensor) -> Tensor:
    """Returns the row of a slice: 1D float64, on its device."""
    exact = mean.double()
    total, count = exact.sum(), torch.full((), exact.numel(), dtype=torch.float64, device=mean.device)
    least, greatest = exact.aminmax()
    spread = (exact - total / count).square().sum()
    zeros, nonfinite = (exact == 0).sum(), exact.numel() - exact.isfinite().sum()
    columns = [count, total, exact.abs().sum(), exact.square().sum(), spread, least, greatest, zeros, nonfinite]
    return torch.stack([each.double() for each in columns])


def _everyones(domain: Domain, rows: Array) -> Array:
    """Collective: returns the rows of all pieces, of which each rank has filled in its own: the rest is zeros."""
    world, device = domain.mesh.world, domain.device
    vector = torch.from_numpy(rows).view(torch.int64).view(-1)
    stays = device.type != "cpu" and world.size > 1 and world.carries(device)
    moving = sent(vector, device) if stays else vector
    world.all_reduce(moving, _ADDING)
    if stays:
        vector.copy_(world.read(moving, _ADDING))
    return vector.view(torch.float64).view(rows.shape).numpy()
