"""Cuts a rule into passes at its reductions: what one pass over a shard can compute, until all ranks have met.

A reduction (``norm``, ``mean_square``, ``max_abs``) is over all elements of a param, which lie on several ranks. So its
result is known once every rank has read its own elements and all have added up. LAMB has two passes::

    pass 0    exp_avg, exp_avg_sq     assigned and stored
              norm(param), norm(u)    measured: sums of each block
              - one all-reduce for all params -
    pass 1    u                       computed again, from the stored states
              param                   assigned and stored

Nothing is kept between passes but what is stored: a pass computes again what it needs of the passes before it. A state
is stored by the first pass that can compute it and that no later pass follows which needs what the state was before.
The param is stored by the last pass; a rule without reductions has no other. Reductions of the same pass share an
all-reduce, so that a rule has as many cuts as its longest chain of reductions.

Where a later pass reads a stored state, every pass computes with what its format holds of the new value, not with the
value that was rounded: all passes then mean the same number.
"""

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .rule import Variant
from .words import REDUCTIONS


@dataclass(frozen=True)
class Pass:
    """One pass of a rule over a shard; a kernel is compiled of it.

    Attributes:
        rule: a name of its own.
        states: those of the variant, so that rounding is the same in each pass.
        scalars: those of the variant, then ``"0"``, ``"1"``... for the results of its reductions.
        source: assignments, as those of a :class:`Variant`, and on ``measured_<k>``: the argument of reduction ``k``.
        written: the states that the pass stores.
        rounded: the states that it computes new values of, and whose stored value another pass reads.
        measured: the numbers of the reductions whose argument the pass computes.
        words: what each of these reductions is.
        writes_param: True for the last pass.
        products: those of the variant.
    """

    rule: str
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    source: str = field(repr=False)
    written: tuple[str, ...]
    rounded: tuple[str, ...]
    measured: tuple[int, ...]
    words: tuple[str, ...]
    writes_param: bool
    products: tuple[str, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The columns of the table of scalars that the results of ``measured`` go into."""
        return tuple(self.scalars.index(str(number)) for number in self.measured)


class _Line(NamedTuple):
    """One assignment of a variant's source."""

    target: str
    text: str  # what is assigned; for a reduction its argument
    reads: tuple[tuple[str, int], ...]  # names, and the line that assigned each; -1: what the kernel loads
    reduction: int | None


@functools.cache
def passes_of(variant: Variant) -> tuple[Pass, ...]:
    """Returns the passes of a variant in their order; a single one if it has no reductions."""
    return _Cut(variant).passes()


class _Cut:
    """The dependencies of one variant."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.lines = _lines_of(variant.source)
        self.last = {line.target: number for number, line in enumerate(self.lines)}  # the final assignment to each name
        self.levels = self._levels()
        finals = [self.levels[self.last[name]] for name in ("param", *self._assigned_states())]
        self.count = max(finals) + 1
        # State -> the pass that stores it.
        self.stored_by = {name: self.levels[self.last[name]] for name in self._assigned_states()}

    def _assigned_states(self) -> list[str]:
        names = [f"state_{name}" for name in self.variant.states]
        return [name for name in names if name in self.last]

    def _levels(self) -> list[int]:
        """Returns of each line the first pass that can compute it; of a reduction, that which knows its result."""
        levels: list[int] = []
        for line in self.lines:
            level = max((levels[at] for _, at in line.reads if at >= 0), default=0)
            levels.append(level + (line.reduction is not None))
        return levels

    def passes(self) -> tuple[Pass, ...]:
        while True:
            slices = [self._slice(number) for number in range(self.count)]
            if None not in slices:
                break
        needed = [each for each in slices if each is not None]
        shared = {name for _, loaded in needed for name in loaded}
        return tuple(self._pass(number, lines, shared) for number, (lines, _) in enumerate(needed))

    def _slice(self, number: int) -> tuple[set[int], set[str]] | None:
        """Returns the lines that a pass runs, and the states whose new values it loads.

        None if it needs what a state was before a pass that stores it: this pass is the one that stores it now.
        """
        found: set[int] = set()
        loaded: set[str] = set()
        waiting = [(self.lines[at].target, at) for at in self._targets(number)]
        while waiting:
            name, at = waiting.pop()
            storer = self.stored_by.get(name)
            if storer is not None and number > storer:
                if at != self.last[name]:
                    self.stored_by[name] = number
                    return None
                loaded.add(name)
            elif at >= 0 and at not in found and not self._is_known(number, at):
                found.add(at)
                waiting += self.lines[at].reads
        return found, loaded

    def _is_known(self, number: int, at: int) -> bool:
        """True for the result of a reduction, which is a scalar of the pass."""
        return self.lines[at].reduction is not None and self.levels[at] <= number

    def _targets(self, number: int) -> list[int]:
        targets = [self.last[name] for name, storer in self.stored_by.items() if storer == number]
        targets += self._measured(number)
        return [*targets, self.last["param"]] if number == self.count - 1 else targets

    def _measured(self, number: int) -> list[int]:
        """Returns the lines of the reductions whose arguments a pass computes."""
        if number == self.count - 1:
            return []
        reductions = [at for at, line in enumerate(self.lines) if line.reduction is not None]
        return [at for at in reductions if self.levels[at] == number + 1]

    def _pass(self, number: int, lines: set[int], shared: set[str]) -> Pass:
        variant, source = self.variant, []
        for at in sorted(lines):
            line = self.lines[at]
            source.append(f"{line.target if line.reduction is None else f'measured_{line.reduction}'} = {line.text}")
        assigned = [name for name in self._assigned_states() if self.last[name] in lines]
        measured = [each for at in self._measured(number) if (each := self.lines[at].reduction) is not None]
        return Pass(
            rule=f"{variant.rule}_{number}",
            states=variant.states,
            scalars=(*variant.scalars, *map(str, range(len(variant.reductions)))),
            source="\n".join(source),
            written=_plain(name for name in assigned if self.stored_by[name] == number),
            rounded=_plain(name for name in assigned if name in shared),
            measured=tuple(measured),
            words=tuple(variant.reductions[each] for each in measured),
            writes_param=number == self.count - 1,
            products=variant.products,
        )


def _plain(states: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix("state_") for name in states)


def _lines_of(source: str) -> list[_Line]:
    lines: list[_Line] = []
    assigned: dict[str, int] = {}
    for number, statement in enumerate(ast.parse(source).body):
        assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        target, value, reduction = statement.targets[0].id, statement.value, None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in REDUCTIONS:
            value, reduction = value.args[0], int(target.removeprefix("s_"))
        names = dict.fromkeys(each.id for each in ast.walk(value) if isinstance(each, ast.Name))
        reads = tuple((name, assigned.get(name, -1)) for name in names)
        lines.append(_Line(target, ast.unparse(value), reads, reduction))
        assigned[target] = number
    return lines
