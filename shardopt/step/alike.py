"""Params whose scalars are alike in a step: the rule is evaluated once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..domain.history import History
from ..rules.rule import FP32_EPS
from .matrix_passes import runs_of, shapes_for
from .variants import Variants, eps_of

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..rules import Rule, Variant
    from ..rules.matrix import MatrixScalars
    from ..rules.rule import Shape
    from .param_update import ParamUpdate


class ParamScalars(NamedTuple):
    """What a step evaluates for params that are alike."""

    values: tuple[float, ...]  # in the order of the names in the variant
    carried: dict[str, float]  # what their next step gets


class StepScalars(NamedTuple):
    """The scalars of one step."""

    of_alike: Sequence[ParamScalars]  # by the numbers of :class:`AlikeParams`
    runs: Mapping[ParamRecord, tuple[MatrixScalars, ...]]  # where matrices of one param take other values


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
    """

    def __init__(self, rule: Rule, numbers: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]):
        self._rule = rule
        variant_of = Variants(rule, numbers)
        matrices = [shapes_for(variant_of(index), group) for index, group in enumerate(numbers)]
        self.histories: list[History] = []
        self.number_of: dict[ParamRecord, int] = {}
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

    def scalars(self, numbers: Sequence[Mapping[str, Any]]) -> StepScalars:
        """Evaluates the rule's scalars for the next step, whose numbers choose the same variants."""
        rule, found = self._rule, list[ParamScalars]()
        for kind, history in zip(self._kinds, self.histories, strict=True):
            group = numbers[kind.group] if kind.matrix is None else {**numbers[kind.group], "shape": kind.matrix}
            step, carried = history.step + 1, history.carried
            found += (ParamScalars(*rule.evaluate(kind.variant, group, step, carried, kind.shape, kind.eps)),)
        if not self._in_runs:
            return StepScalars(found, {})
        variant_of = Variants(rule, numbers)
        runs = {
            entry: runs_of(rule, variant_of(group), numbers[group], entry, shapes)
            for group, entry, shapes in self._in_runs
        }
        return StepScalars(found, {entry: each for entry, each in runs.items() if each})
