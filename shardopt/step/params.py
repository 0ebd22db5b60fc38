"""The params of a step: each with the gradient that updates it, and what its scalars depend on.

Params whose scalars are alike are sorted together: the rule is evaluated once for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..domain.history import History
from ..kernels.products import Geometry, geometry_of
from ..kernels.tables import BLOCK
from ..rules.matrix import MatrixScalars, check_runs, matrices_of, scalars_of_matrices
from ..rules.rule import FP32_EPS

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..rules import Rule, Variant
    from ..rules.rule import Shape
    from ..tensors.gradient_slice import GradientSlice

_NO_GRADIENT = torch.empty(0)
_geometry = functools.cache(geometry_of)


class ParamUpdate(NamedTuple):
    """One param in a step: where it stands in the param groups, and the gradient that updates it.

    Attributes:
        group: index of the param's group.
        number: index of the param, counted through all groups. The upper 32 bits number the slice of a DTensor.
        grad: dense, in the param's storage order: the whole gradient, or this rank's slice of a reduced one.
        start: index in the param of the first element of ``grad``.
        gradient_slice: the slice whose ``total`` is ``grad``; None for a gradient that is not reduced by shardopt.
        divisor: number by which ``grad`` still has to be divided; 1 for a mean.
        is_on_host: true if ``grad`` is in host memory and the param is on a device.
    """

    entry: ParamRecord
    group: int
    number: int
    grad: torch.Tensor = _NO_GRADIENT
    start: int = 0
    gradient_slice: GradientSlice | None = None
    divisor: int = 1
    is_on_host: bool = False


# -- what of a rule depends on a param ---------------------------------------------------------------------------------


class Variants:
    """The variants of a rule for the params of a step: one a group, or where it asks of params two or more."""

    def __init__(self, rule: Rule, numbers: Sequence[Mapping[str, Any]]):
        self._rule, self._numbers = rule, numbers
        self._known: dict[tuple[int, Shape], Variant] = {}

    def __call__(self, group: int, shape: Shape = ()) -> Variant:
        """Returns the variant for a param of this shape in group ``group``."""
        key = group, tuple(shape) if self._rule.asked_of_param else ()
        if key not in self._known:
            self._known[key] = self._rule.variant(self._numbers[group], key[1])
        return self._known[key]


def eps_of(param: torch.Tensor) -> float:
    """Returns the distance from 1 to the next number of the param's dtype."""
    return float(torch.finfo(param.dtype).eps)


def param_geometry(entry: ParamRecord) -> Geometry:
    """Returns how rows and columns of a param lie in its storage order.

    Raises:
        ShardoptError: its dimensions lie in an order that no table has room for.
    """
    return _geometry(tuple(entry.param.shape), entry.shard.strides(entry.index))


# -- scalars -----------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    group: int
    variant: Variant
    matrix: tuple[int, int] | None  # the shape of the first matrix, of a rule of whole matrices
    shape: Shape  # () unless the rule asks for facts of params
    eps: float


class AlikeParams:
    """The params of a step, sorted by what their scalars depend on: group, history, and facts of the param.

    Attributes:
        number_of: of each record that is updated, which of :attr:`histories` it has.
        histories: one for the params that are alike.
        scalars: by these numbers, those of the step that was evaluated last: values in the order of the names in the
            variant, and what the next step gets.
        runs: at the same time, those of the matrices of one param, where they take other values.
    """

    def __init__(self, rule: Rule, numbers: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]):
        self._rule = rule
        variant_of = Variants(rule, numbers)
        matrices = [_shapes_for(variant_of(index), group) for index, group in enumerate(numbers)]
        self.histories: list[History] = []
        self.number_of: dict[ParamRecord, int] = {}
        self.scalars: list[tuple[tuple[float, ...], dict[str, float]]] = []
        self.runs: Mapping[ParamRecord, tuple[MatrixScalars, ...]] = {}
        self._kinds: list[_Kind] = []
        self._in_runs: list[tuple[int, ParamRecord, Sequence[tuple[int, int]]]] = []
        known: dict[tuple[Any, ...], int] = {}
        for each in updates:
            entry, matrix_of, history = each.entry, matrices[each.group], each.entry.history
            shapes = None if matrix_of is None else matrix_of(entry.shape)
            shape = entry.shape if rule.of_param else ()
            eps = eps_of(entry.param) if rule.of_param else FP32_EPS
            matrix = None if shapes is None else shapes[0]
            key = (each.group, history.step, matrix, shape, eps, *history.carried.values())
            number = known.setdefault(key, len(known))
            if number == len(self.histories):
                self.histories.append(History(history.step, history.carried))
                self._kinds.append(_Kind(each.group, variant_of(each.group, shape), matrix, shape, eps))
            self.number_of[entry] = number
            if shapes is not None and len(set(shapes)) > 1:
                self._in_runs.append((each.group, entry, shapes))

    def share(self) -> None:
        """Gives params that are alike one history, which nothing else has."""
        for entry, number in self.number_of.items():
            entry.history = self.histories[number]

    def evaluate(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Evaluates the rule's scalars for the next step, whose numbers choose the same variants."""
        rule, found = self._rule, list[tuple[tuple[float, ...], dict[str, float]]]()
        for kind, history in zip(self._kinds, self.histories, strict=True):
            group = numbers[kind.group] if kind.matrix is None else {**numbers[kind.group], "shape": kind.matrix}
            found += (rule.evaluate(kind.variant, group, history.step + 1, history.carried, kind.shape, kind.eps),)
        self.scalars = found
        if self._in_runs:
            variant_of = Variants(rule, numbers)
            runs = [
                (entry, _runs_of(rule, variant_of(group), numbers[group], entry, shapes))
                for group, entry, shapes in self._in_runs
            ]
            self.runs = {entry: each for entry, each in runs if each}


def _shapes_for(
    variant: Variant, group: Mapping[str, Any]
) -> Callable[[Sequence[int]], tuple[tuple[int, int], ...]] | None:
    """Returns a function from the shape of a param to those of its matrices; None for a rule of no matrices."""
    if variant.around is None:
        return None
    # An empty stack has no matrix, but scalars as if it had one.
    return lambda shape: tuple(matrices_of(shape, group.get("matrices"))) or ((shape[-2], shape[-1]),)


def _runs_of(
    rule: Rule, variant: Variant, group: Mapping[str, Any], entry: ParamRecord, shapes: Sequence[tuple[int, int]]
) -> tuple[MatrixScalars, ...]:
    """Returns the scalars of the matrices of one param; none where all matrices share them.

    Raises:
        ShardoptError: no kernel can tell the elements of the matrices apart.
    """
    assert variant.around is not None
    runs = scalars_of_matrices(
        shapes, lambda shape: rule.evaluate(variant, {**group, "shape": shape}, entry.step + 1, entry.carried)[0]
    )
    is_whole = tuple(entry.param.shape) == tuple(entry.shape)  # no slice of a DTensor
    lie_in_rows = is_whole and entry.shard.strides(entry.index)[-2:] == (shapes[0][1], 1)
    check_runs(runs, BLOCK, lie_in_rows, len(variant.around[0].scalars))
    return tuple(runs) if len(runs) > 1 else ()
