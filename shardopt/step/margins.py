"""The part of a step before the passes of a factored rule: sums of squares over rows and columns, on all ranks.

::

    gradients   | sums of this rank's elements |            | new margins, |
    all ranks                                  | one sum    | factors      |  passes, as of any rule that takes norms
    mesh                                       | one more   |                 of slices of DTensors, in each dimension

Margins are kept whole on every rank, and made anew in each step: those of before stay what they were until all ranks
have taken the step. So nothing is undone after an error, and a state dict or a save of before holds the old ones.

They lie in host memory, where the factors are made. A GPU adds up the sums of the gradients that lie on it; these come
to the host by one copy, with one wait, and the factors go back by one copy.

The ranks of a tensor mesh hold slices of one param. What the data-parallel ranks of each slice have added up is put
where it belongs among the rows and columns of the whole param, and added up once more::

    param of 4 x 6, Shard(1)     x x x | y y y      rows of the whole:      x + y, of both ranks
    over two ranks               x x x | y y y      columns of the whole:   x x x y y y, of one rank each
                                 x x x | y y y
                                 x x x | y y y

So margins are those of the whole param on every mesh. A rank's kernels read the factors of its own rows and columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..domain.dtensors import box_of
from ..errors import CommunicationError
from ..kernels.launch import backend_of
from ..kernels.products import COLUMNS, FIRST, INNER, OUTER, RUN, Geometry, MarginPiece, Products
from ..kernels.tables import sent
from ..partition.comm.together import riding_on
from ..rules.factored import FactoredRule
from .params import ParamUpdate, Variants, eps_of, param_geometry

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..kernels.tables import Factors
    from ..partition.comm.group import Ranks
    from ..partition.comm.together import Relay
    from .launches import Launch, StepPlan

    Array = np.ndarray[Any, Any]
    Launches = Mapping[Shard, Sequence[Launch]]
    _Factors = Mapping[ParamRecord, tuple[torch.Tensor, torch.Tensor]]  # of the outer and of the inner

_ADDING_UP = "adding up squares over rows and columns"


_Index = tuple[Any, ...]  # of a part of an array


class _Whole(NamedTuple):
    """Sums of a whole param: float64 arrays of its shape without the columns, and without the rows.

    Attributes:
        own_rows, own_columns: where those of this rank's slice lie in them.
    """

    rows: Array
    columns: Array
    own_rows: _Index = (...,)
    own_columns: _Index = (...,)


class _Sums(NamedTuple):
    """Of this rank's slice of one param: views of the message of all, 1D float64."""

    update: ParamUpdate
    geometry: Geometry
    rows: torch.Tensor
    columns: torch.Tensor

    def piece(self, launch: Launch, row: int) -> MarginPiece:
        """Returns this rank's elements of the param."""
        each, piece = launch.updates[row], launch.shard.pieces[row]
        grad = each.grad.as_strided((piece.numel,), (1,), each.grad.storage_offset() + piece.start - each.start)
        return MarginPiece(grad, piece.start, self.geometry, self.rows, self.columns)


class MarginSums:
    """The params of a step that have margins, in the order of the message that adds up; frozen with the step's plan."""

    def __init__(self, domain: Domain, numbers: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]):
        variant_of = Variants(domain.rule, numbers)
        self.updates = [each for each in updates if variant_of(each.group, each.entry.shape).margins]
        geometries = [param_geometry(each.entry) for each in self.updates]
        self._numel = sum(each.rows + each.num_columns for each in geometries)

    def with_products(self, plan: StepPlan, launches: Launches, factors: Factors, relay: Relay) -> Launches:
        """Collective: makes the new margins of all params, which the step's commit keeps.

        Args:
            launches: their gradients are divided.
            relay: keeps this rank from taking part, if the rank has failed. What goes wrong once the ranks have met is
                kept there, until they meet next.

        Returns:
            The launches with their products; as they are, if this rank has failed.

        Raises:
            Exception: this rank's error; CommunicationError on the other ranks.
        """
        mesh = plan.domain.mesh
        message = torch.from_numpy(np.zeros(self._numel + 1))  # the last one: how many ranks have failed
        sums = _views(self.updates, message)
        if mesh.world.rank in mesh.one_copy:  # replicas hold the same, which counts once
            relay.attempt(_add_own, mesh.world, launches, sums, message[:-1], factors)
        whole = relay.meet(riding_on(lambda failed: _exchange(plan.domain, sums, message, failed)))
        relay.check()
        return relay.attempt(_with_tables, plan, launches, sums, whole) or launches


def _exchange(
    domain: Domain, sums: Mapping[ParamRecord, _Sums], message: torch.Tensor, has_failed: bool
) -> dict[ParamRecord, _Whole]:
    """Collective: returns the sums of whole params."""
    message[-1] = has_failed
    domain.mesh.world.all_reduce(message, _ADDING_UP)
    whole, failed = _joined(domain, sums, bool(message[-1]))
    if failed:
        raise CommunicationError(
            "look at the output of the other ranks for an error: one of them could not add up squares over rows and "
            "columns, so no rank knows these sums and none can finish this step."
        )
    return whole


def _with_tables(
    plan: StepPlan, launches: Launches, sums: Mapping[ParamRecord, _Sums], whole: Mapping[ParamRecord, _Whole]
) -> Launches:
    """Makes the new margins, and returns the launches with tables of their products."""
    made = {entry: _made(plan, each, whole[entry]) for entry, each in sums.items()}
    devices = {each.shard.home.device for its in launches.values() for each in its}
    made_on = {device: _sent(made, device) for device in devices}
    return {
        shard: [_with_table(each, sums, made_on[each.shard.home.device]) for each in its]
        for shard, its in launches.items()
    }


def _views(updates: Iterable[ParamUpdate], message: torch.Tensor) -> dict[ParamRecord, _Sums]:
    """Returns the sums of each param, which lie one behind the other in a message."""
    sums, start = {}, 0
    for each in updates:
        geometry = param_geometry(each.entry)
        middle, stop = start + geometry.rows, start + geometry.rows + geometry.num_columns
        sums[each.entry] = _Sums(each, geometry, message[start:middle], message[middle:stop])
        start = stop
    return sums


def _add_own(
    world: Ranks, launches: Launches, sums: Mapping[ParamRecord, _Sums], message: torch.Tensor, factors: Factors
) -> None:
    """Fills in the sums of this rank's elements, made where the gradients lie: those of all launches together.

    Args:
        message: what ``sums`` are views of.
    """
    pieces: dict[tuple[torch.device, Factors], list[MarginPiece]] = defaultdict(list)
    sums_on = {message.device: sums}
    messages: dict[torch.device, torch.Tensor] = {}
    for launch in (each for its in launches.values() for each in its):
        folded = factors._replace(divisor=launch.divisor).folded()
        assert folded is not None  # all others were divided
        for row, each in launch.updates.items():
            if each.entry in sums:
                device = each.grad.device
                if device not in sums_on:
                    messages[device] = torch.zeros(message.shape, dtype=message.dtype, device=device)
                    sums_on[device] = _views([of.update for of in sums.values()], messages[device])
                pieces[device, folded].append(sums_on[device][each.entry].piece(launch, row))
    for (device, folded), of_device in pieces.items():
        backend_of(device).add_margin_sums(of_device, folded)
    for there in messages.values():
        message += world.read(there, _ADDING_UP)


def _joined(domain: Domain, sums: Mapping[ParamRecord, _Sums], failed: bool) -> tuple[dict[ParamRecord, _Whole], bool]:
    """Collective over tensor meshes: returns the sums of whole params, and True if some rank could not add up.

    Args:
        sums: of slices, which the ranks that hold the same have added up.
        failed: some of these ranks could not.
    """
    whole = {entry: _placed(entry, each) for entry, each in sums.items()}
    for ranks, entries in domain.by_mesh(sums).items():
        arrays = [array for entry in entries for array in whole[entry][:2]]
        message = torch.from_numpy(np.concatenate([*(array.reshape(-1) for array in arrays), [float(failed)]]))
        ranks.all_reduce(message, _ADDING_UP)
        failed = bool(message[-1])
        for array, found in zip(arrays, message[:-1].split([array.size for array in arrays]), strict=True):
            array[...] = found.numpy().reshape(array.shape)
    return whole, failed


def _placed(entry: ParamRecord, sums: _Sums) -> _Whole:
    """Returns the sums of a slice as some of those of the whole param, of which all others are zero."""
    shape, own, rows, columns = entry.shape, tuple(entry.param.shape), sums.rows.numpy(), sums.columns.numpy()
    own_rows, own_columns = rows.reshape(own[:-1]), columns.reshape(own[:-2] + own[-1:])
    if own == shape:
        return _Whole(own_rows, own_columns)
    spans = [slice(first, first + size) for first, size in zip(*box_of(entry.outer, entry.name), strict=True)]
    found = _Whole(np.zeros(shape[:-1]), np.zeros(shape[:-2] + shape[-1:]), tuple(spans[:-1]), (*spans[:-2], spans[-1]))
    found.rows[found.own_rows], found.columns[found.own_columns] = own_rows, own_columns
    return found


def _made(plan: StepPlan, sums: _Sums, whole: _Whole) -> tuple[torch.Tensor, torch.Tensor]:
    """Notes the new margins of one param. Returns the factors of this rank's slice: of the outer and of the inner."""
    each = sums.update
    rule = plan.domain.rule.of(plan.numbers[each.group])
    assert isinstance(rule, FactoredRule)
    entry, shape = each.entry, each.entry.shape
    lengths = {-1: max(shape[-1], 1), -2: max(shape[-2], 1)}
    found = {-1: whole.rows, -2: whole.columns}
    means: dict[str, Array] = {}
    before: dict[str, Array] = {}
    with np.errstate(over="ignore", invalid="ignore"):  # as in fp32 anywhere else
        for name, dim in rule.means.items():
            of_shape = rule.state_shape(name, shape)
            means[name] = (found[dim] / lengths[dim]).astype(np.float32).reshape(of_shape)
            before[name] = entry.margins[name].numpy() if name in entry.margins else np.zeros(of_shape, np.float32)
        scalars = rule.values(plan.numbers[each.group], entry.step + 1, entry.carried, shape, eps_of(entry.param))
        new, rows, columns = rule.factors(means, before, scalars)
    plan.margins[entry] = {name: torch.from_numpy(value) for name, value in new.items()}
    own_rows = np.ascontiguousarray(rows.reshape(whole.rows.shape)[whole.own_rows])
    own_columns = np.ascontiguousarray(columns.reshape(whole.columns.shape)[whole.own_columns])
    factors = torch.from_numpy(own_rows.reshape(-1)), torch.from_numpy(own_columns.reshape(-1))
    return factors if sums.geometry.outer_is_row else factors[::-1]


def _sent(made: _Factors, device: torch.device) -> _Factors:
    """Returns the factors of all params where kernels run, by one copy."""
    if device.type == "cpu":
        return made
    flat = [each for factors in made.values() for each in factors]
    there = iter(sent(torch.cat(flat), device).split([len(each) for each in flat]))
    return {entry: (next(there), next(there)) for entry in made}


def _with_table(launch: Launch, sums: Mapping[ParamRecord, _Sums], made: _Factors) -> Launch:
    """Returns the launch with the products of its params; as it is, if it reads none."""
    members = {row: each.entry for row, each in launch.updates.items() if each.entry in sums}
    if not members:
        return launch
    table = np.zeros((launch.shard.tables.num_rows, COLUMNS), np.int64)
    for row, entry in members.items():
        piece, (outer, inner) = launch.shard.pieces[row], made[entry]
        table[row, FIRST] = piece.start - piece.shard_start
        table[row, OUTER], table[row, INNER] = outer.data_ptr(), inner.data_ptr()
        table[row, RUN:] = sums[entry].geometry.columns
    return replace(launch, products=Products(torch.from_numpy(table), [made[entry] for entry in members.values()]))
