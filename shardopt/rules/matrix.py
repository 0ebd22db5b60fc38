"""A rule of whole matrices: accumulate (elementwise), a function of each matrix (torch code), apply (elementwise).

::

    @rule(states=("momentum",), scalars=my_scalars)
    def accumulate(param, grad, state, s):              # one pass over the shards; param cannot be read
        state.momentum = s.beta * state.momentum + grad
        return state.momentum                           # the update, in bf16

    @rule(scalars=my_scalars)
    def apply(param, update, state, s):                 # another pass; update is what the function made
        return param - s.lr * update

    @matrix_rule(accumulate=accumulate, apply=apply)
    def my_rule(update, group):                         # the whole matrix, 2D bf16, on one rank
        return update / update.norm()

The two passes are rules as ``rule.py`` has them, and fused kernels. Between them the slices of each matrix travel to
one rank, which calls the function, and its result travels back: both in bf16.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..errors import RuleError, ShardoptError
from .rule import FP32_EPS, Rule, Shape, Variant

# (update: 2D bf16, which the function may overwrite, the param group's plain numbers) -> 2D of the same shape.
MatrixFunction = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]

STACK = "stack"


@dataclass(frozen=True, kw_only=True)
class MatrixRule(Rule):
    """A rule of whole matrices; the decorator :func:`matrix_rule` makes it."""

    accumulate: Rule
    apply: Rule
    matrix: MatrixFunction = field(repr=False)

    def averaging(self, decay: float) -> MatrixRule:
        """See :meth:`Rule.averaging`: the second pass writes the param, and keeps its average."""
        averaged = super().averaging(decay)
        assert isinstance(averaged, MatrixRule)
        return replace(averaged, apply=self.apply.averaging(decay))

    def variant(self, group: Mapping[str, Any], shape: Shape = ()) -> Variant:
        """See :meth:`Rule.variant`."""
        first, second = self.accumulate.variant(group), self.apply.variant(group)
        states, scalars = (*first.states, *second.states), (*first.scalars, *second.scalars)
        source = first.source + second.source
        return Variant(self.name, states, scalars, source, around=(first, second))

    def evaluate(
        self,
        variant: Variant,
        group: Mapping[str, Any],
        step: int,
        carried: Mapping[str, float],
        shape: Shape = (),
        eps: float = FP32_EPS,
    ) -> tuple[tuple[float, ...], dict[str, float]]:
        """See :meth:`Rule.evaluate`. ``group["shape"]`` is that of the matrix; (1, 1) where no param is meant."""
        assert variant.around is not None
        group = {"shape": (1, 1), **group}
        first, carries = self.accumulate.evaluate(variant.around[0], group, step, carried, shape, eps)
        second, also_carries = self.apply.evaluate(variant.around[1], group, step, carried, shape, eps)
        return (*first, *second), {**carries, **also_carries}


def matrix_rule(*, accumulate: Rule, apply: Rule) -> Callable[[MatrixFunction], MatrixRule]:
    """Makes a rule of a function ``(update, group)`` of one whole matrix, and of the passes before and after it.

    The function gets the update that ``accumulate`` returned, 2D in bf16, and the param group's plain numbers. It
    returns a tensor of the same shape, which is rounded to bf16. It must depend on nothing else: each matrix is given
    to one rank, whichever that is. It runs under ``torch.no_grad()``.

    Args:
        accumulate: a rule that returns the update in place of the param, which it cannot read.
        apply: a rule that takes the function's result in place of the gradient, and returns the param.

    In both, ``scalars`` finds the shape of the matrix, (rows, columns), as ``group["shape"]``.

    Raises:
        RuleError: ``accumulate`` reads the param, both passes keep a state or carry a scalar of one name, or the
            function takes other arguments.
        TypeError: one of them is not a rule.
    """
    for name, each in (("accumulate", accumulate), ("apply", apply)):
        if not isinstance(each, Rule) or isinstance(each, MatrixRule):
            raise TypeError(f"{name} takes what shardopt.rule makes of a function, found {type(each).__name__}.")
    shared = sorted({*accumulate.states, *accumulate.carried} & {*apply.states, *apply.carried})
    if shared:
        raise RuleError(
            f"keep each state in one of the two passes: {accumulate.name!r} and {apply.name!r} both have {shared}, "
            "whose values would be those of one pass or of the other."
        )
    if accumulate.initial or apply.initial:
        raise RuleError("leave initial= out of the passes of a matrix rule: its states begin with zeros.")
    measuring = [each.name for each in (accumulate, apply) if each.takes_norms or each.of_param]
    if measuring:
        raise RuleError(
            f"take norms of the matrix in the function: {measuring[0]!r} asks for one, or for facts of the param, and "
            "each pass of a matrix rule is one kernel."
        )
    if any(_reads_param(accumulate, flags) for flags in _settings(accumulate)):
        raise RuleError(
            f"move what reads the param from {accumulate.name!r} to {apply.name!r}: the first pass returns the update, "
            "for which it is given no param."
        )

    def decorate(function: MatrixFunction) -> MatrixRule:
        try:
            inspect.signature(function).bind("update", "group")
        except TypeError as error:
            raise RuleError(
                f"give {function.__name__!r} two arguments, (update, group): it would fail in the first step ({error})."
            ) from error
        return MatrixRule(
            name=function.__name__,
            states=(*accumulate.states, *apply.states),
            flags=tuple(dict.fromkeys((*accumulate.flags, *apply.flags))),
            carried=(*accumulate.carried, *apply.carried),
            counts_steps=accumulate.counts_steps or apply.counts_steps,
            nonnegative=accumulate.nonnegative | apply.nonnegative,
            tolerated={**accumulate.tolerated, **apply.tolerated},
            scalars=accumulate.scalars,
            function=accumulate.function,
            tree=accumulate.tree,
            accumulate=accumulate,
            apply=apply,
            matrix=function,
        )

    return decorate


def _settings(rule: Rule) -> list[dict[str, bool]]:
    """All flags off, and each one alone: enough to meet every branch that no other flag hides."""
    none = dict.fromkeys(rule.flags, False)
    return [none, dict.fromkeys(rule.flags, True), *({**none, name: True} for name in rule.flags)]


def _reads_param(rule: Rule, flags: Mapping[str, bool]) -> bool:
    tree = ast.parse(rule.variant(flags).source)
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return any(node.id == "param" for node in names)


# -- which matrices a param holds --------------------------------------------------------------------------------------


class MatrixScalars(NamedTuple):
    """The scalars of a run of adjacent matrices of one param that share them."""

    first: int  # element of the param in storage order
    stop: int
    values: tuple[float, ...]  # of both passes


def matrices_of(shape: Sequence[int], matrices: object) -> list[tuple[int, int]]:
    """Returns the shapes of the matrices that a param of this shape holds, one behind the other.

    Args:
        matrices: of the param group: None or 1, the param is one matrix; a number, into how many equal ones it is cut
            along its first dimension; several numbers, the rows of each; "stack", it is 3D, a stack of matrices.

    Raises:
        ValueError: the shape does not fit.
    """
    if matrices == STACK:
        if len(shape) != 3:
            raise ValueError(
                f'matrices="stack" takes 3D params, a stack of matrices, found one of shape {tuple(shape)}'
            )
        return [(shape[1], shape[2])] * shape[0]
    if isinstance(matrices, tuple | list):
        if not matrices or not all(map(_is_count, matrices)):
            raise ValueError(f"matrices takes the rows of each matrix, at least 1, found {matrices!r}")
        if len(shape) != 2 or shape[0] != sum(matrices):
            raise ValueError(
                f"matrices={tuple(matrices)} takes 2D params of {sum(matrices)} rows, found one of shape {tuple(shape)}"
            )
        return [(rows, shape[1]) for rows in matrices]
    count = 1 if matrices is None else matrices
    if not isinstance(count, int) or not _is_count(count):
        raise ValueError(
            f'matrices takes a number of matrices, at least 1, the rows of each, or "stack", found {matrices!r}'
        )
    if len(shape) != 2 or shape[0] % count:
        raise ValueError(
            f"matrices={matrices} takes 2D params whose first dimension it divides, found one of shape {tuple(shape)}"
        )
    return [(shape[0] // count, shape[1])] * count


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def scalars_of_matrices(
    shapes: Sequence[tuple[int, int]], values_of: Callable[[tuple[int, int]], tuple[float, ...]]
) -> list[MatrixScalars]:
    """Returns the scalars of a param's matrices, those together that are adjacent and share them.

    Args:
        values_of: evaluates the scalars of a matrix of this shape.
    """
    known = {shape: values_of(shape) for shape in dict.fromkeys(shapes)}
    found: list[MatrixScalars] = []
    first = 0
    for shape in shapes:
        stop, values = first + shape[0] * shape[1], known[shape]
        if found and found[-1].values == values:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(MatrixScalars(first, stop, values))
        first = stop
    return found


def check_runs(runs: Sequence[MatrixScalars], block: int, lie_in_rows: bool, num_accumulate: int) -> None:
    """Raises ShardoptError if matrices of one param take other scalars, and no kernel can tell their elements apart.

    Args:
        block: elements that share a row of the kernel's table.
        lie_in_rows: True if the matrices lie one behind the other in memory, on this rank.
        num_accumulate: scalars of the first pass.
    """
    if len(runs) < 2:
        return
    if len({each.values[:num_accumulate] for each in runs}) > 1:
        found = "the first pass of the rule depends on their shapes"
    elif not lie_in_rows:
        found = "their rows are not adjacent in the memory of a rank"
    elif any(each.first % block for each in runs):
        found = f"they begin at elements {[each.first for each in runs]}, not all at multiples of {block}"
    else:
        return
    raise ShardoptError(
        "cut the weight into params of their own, or make its matrices of one shape: matrices of one param have step "
        f"sizes of their own, and {found}. Some elements would be updated by the step size of another matrix."
    )
