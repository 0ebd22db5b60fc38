"""A rule: the arithmetic of one update, written once, as a plain Python function on fp32 scalars.

::

    @rule(scalars=my_scalars, states=("momentum",))
    def my_rule(param, grad, state, s):
        state.momentum = s.beta * state.momentum + grad
        return param - s.lr * sign(state.momentum)

Training never calls the function. Its source is parsed when it is decorated; whatever lies outside the vocabulary is
refused with its line. The Triton kernel and the native kernel come from that one tree (``kernels/``).

What a body may hold:

* ``state.<name>`` to read and assign a state, ``s.<name>`` to read a run-time scalar of this param and step;
* local names, ``+ - * /``, one comparison at a time, ``&`` and ``|`` between comparisons, number literals;
* the words of ``rules/words.py``: ``sqrt abs sign minimum maximum clamp where fma``;
* ``norm mean_square max_abs`` of an expression over all elements of the param: the kernel is cut into passes there, see
  ``rules/passes.py``;
* ``if flags.<name>:`` (with ``not`` and ``else``), resolved before anything is compiled: the flag is the truth of the
  param group's value of that name, so ``flags.momentum`` is ``group["momentum"] != 0``, or of a fact that ``of_param``
  names;
* one ``return``, last: the new param.
"""

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from ..arguments import flag, mapping, texts
from ..config.formats import StateFormat
from ..errors import RuleError, ShardoptError
from .language import RuleReader, parse_rule

# (param group, step counted from 1, what was carried from the last step) -> scalars by name, in float64.
ScalarFunction = Callable[[Mapping[str, Any], int, Mapping[str, float]], Mapping[str, float]]

Shape = Sequence[int]

EMA = "ema"
_EMA_RATE = "ema_rate"
_ROUNDS_TO_INF = 2.0**128 - 2.0**103  # the least float64 that rounds to an infinite fp32 number
# Other keys of a param's state in a state dict, and names of the kernels' other streams.
_RESERVED = ("step", "master", EMA, "param", "grad")
FP32_EPS = 2.0**-23
# What ``scalars`` and flags may be told of a param: of its whole, on whichever ranks its elements lie. Its shape, and
# the distance from 1 to the next number of its dtype.
FACTS: dict[str, Callable[[Shape, float], float]] = {
    "ndim": lambda shape, eps: len(shape),
    "numel": lambda shape, eps: math.prod(shape),
    "is_matrix": lambda shape, eps: len(shape) >= 2,
    "dtype_eps": lambda shape, eps: eps,
}
# A native kernel tells 32 streams apart: gradient, param, master, tables, and two for each state (its old and its new
# values). With one more state for the average of the weights that leaves room for 12.
MAX_STATES = 12
_STATE_FORMATS = get_args(StateFormat)  # from exact to coarse


@dataclass(frozen=True)
class Variant:
    """A rule with its flags resolved: straight-line source, the key under which kernels are compiled.

    ``source`` holds one assignment a line on the names ``param``, ``grad``, ``state_<name>``, ``s_<name>`` and
    ``local_<name>``, so that no name of the rule can meet one of the kernel's; it ends with ``param = ...``.
    Equal variants share their kernels. ``reductions`` are words on all elements of the param: the source assigns the
    result of number ``k`` to ``s_<k>``, and no one kernel can run it but those of its passes. ``products`` are read as
    states are, and stored nowhere: see ``factored.py``.
    """

    rule: str
    states: tuple[str, ...]  # names, in torch's order
    scalars: tuple[str, ...]  # names, in order of first use
    source: str = field(repr=False)
    reductions: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    margins: tuple[str, ...] = ()  # names of states with a value for each row or column, in torch's order
    # Of a rule of whole matrices: the passes before and after its function. States and scalars are those of both.
    around: tuple["Variant", "Variant"] | None = None


@dataclass(frozen=True)
class Rule:
    """An update rule; the decorator :func:`rule` makes it of a function."""

    name: str
    states: tuple[str, ...]  # every state that some flags may need
    flags: tuple[str, ...]  # keys of the param group whose truth the body asks for
    carried: tuple[str, ...]  # scalars that the param's next step gets, such as NAdam's product of momenta
    counts_steps: bool  # True if torch's state dict of this optimizer holds "step"
    nonnegative: frozenset[str]  # states that are never below zero
    tolerated: Mapping[str, str] = field(repr=False, compare=False, hash=False)  # states that need more than 8 bits
    scalars: ScalarFunction = field(repr=False)
    function: Callable[..., Any] = field(repr=False)
    tree: ast.FunctionDef = field(repr=False, compare=False, hash=False)
    average: float | None = None  # decay of the weights' moving average, where there is one
    # State -> hyper-parameter that fills it as soon as its param is bound. Other states are made at a first step.
    initial: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False, hash=False)
    takes_norms: bool = False  # True if some flags make it look at all elements of a param
    of_param: tuple[str, ...] = ()  # facts of each param, which ``scalars`` finds in the group
    asked_of_param: tuple[str, ...] = ()  # those of them whose truth the body asks for as a flag

    def averaging(self, decay: float) -> "Rule":
        r"""The same rule with a moving average of the weights as its last state, ``ema``.

        .. math::
            \bar\theta_1 = \theta_1, \qquad \bar\theta_t = \bar\theta_{t-1} + (1 - d)(\theta_t - \bar\theta_{t-1})

        :math:`\theta_t` is the param after its update, and :math:`t` counts the param's own steps. The average is the
        one that ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(d)`` holds if it is updated after
        every step. A param that is not updated keeps its average.
        """
        # A step changes the average by a thousandth of a difference, which 8 bits would round away.
        tolerated = {**self.tolerated, EMA: "bf16"}
        return replace(self, states=(*self.states, EMA), tolerated=tolerated, average=decay)

    def of(self, group: Mapping[str, Any]) -> "Rule":
        """Returns the rule of a param group: this one, unless an optimizer holds several."""
        return self

    def tolerates(self, state: str) -> str:
        """Returns the coarsest :data:`shardopt.config.StateFormat` that the state may be stored in."""
        return self.tolerated.get(state, _STATE_FORMATS[-1])

    def initial_values(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Returns the values that fill a param's states before its first step; empty if it has no states until then."""
        states = self.variant(group).states if self.initial else ()
        return {state: float(group[key]) for state, key in self.initial.items() if state in states}

    def state_shape(self, name: str, shape: Shape) -> tuple[int, ...]:
        """Returns the shape in which a state dict holds a state, a master or a margin of a param of this shape."""
        return tuple(shape)

    @property
    def margins(self) -> tuple[str, ...]:
        """Names of states with a value for each row or column, that some params may need."""
        return ()

    def variant(self, group: Mapping[str, Any], shape: Shape = ()) -> Variant:
        """Returns the straight-line form for the flags of a param group, and for a param of this shape.

        Raises:
            RuleError: the group lacks the key of a flag.
        """
        missing = [name for name in self.flags if name not in group]
        if missing:
            raise RuleError(
                f"add {missing[0]!r} to the optimizer's defaults: rule {self.name!r} asks for flags.{missing[0]}, and "
                f"the param group has only {sorted(group)}, so that which branch to take is unknown."
            )
        flags = map(bool, map(group.__getitem__, self.flags))
        variant = _variant(self, (*flags, *self.answers(group, shape)))
        return variant if self.average is None else _averaging(variant)

    def answers(self, group: Mapping[str, Any], shape: Shape) -> tuple[bool, ...]:
        """Returns the truth of the facts that the body asks for as flags, for a param of this shape."""
        return tuple(bool(FACTS[name](shape, FP32_EPS)) for name in self.asked_of_param)

    def _facts(self, shape: Shape, eps: float) -> dict[str, float]:
        return {name: FACTS[name](shape, eps) for name in self.of_param}

    def values(
        self, group: Mapping[str, Any], step: int, carried: Mapping[str, float], shape: Shape, eps: float
    ) -> dict[str, float]:
        """Returns what the scalars function returns for one param, see :meth:`evaluate`."""
        if self.of_param:
            group = {**group, **self._facts(shape, eps)}
        return dict(self.scalars(group, step, carried))

    def evaluate(
        self,
        variant: Variant,
        group: Mapping[str, Any],
        step: int,
        carried: Mapping[str, float],
        shape: Shape = (),
        eps: float = FP32_EPS,
    ) -> tuple[tuple[float, ...], dict[str, float]]:
        """Computes the scalars of ``variant`` for one param.

        Args:
            step: of this param, counted from 1.
            carried: scalars from the param's last step.
            shape: of the whole param, for rules that ask for facts of it.
            eps: of the param's dtype, likewise.

        Returns:
            The scalars in the order of the variant, and those carried to the param's next step.

        Raises:
            ShardoptError: a scalar is not a finite fp32 number: every param of the group would become Inf or NaN.
            RuleError: the rule's scalars function does not return one of them.
        """
        try:
            values = self.values(group, step, carried, shape, eps)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._refuse_scalars(group, step, f"cannot be computed ({error})") from error
        if self.average is not None:
            # The first average is the param itself: the state begins with zeros, which must not count.
            values[_EMA_RATE] = 1.0 if step == 1 else 1.0 - self.average
        try:
            scalars = tuple(map(float, map(values.__getitem__, variant.scalars)))
            carries = {name: float(values[name]) for name in self.carried} if self.carried else {}
        except KeyError as error:
            raise RuleError(
                f"add {error} to the dict that the scalars function returns: rule {self.name!r} needs the scalar "
                f"{error} to compute its update, and the function returned {sorted(values)}."
            ) from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._refuse_scalars(group, step, f"are not numbers ({error})") from error
        every = (*scalars, *carries.values()) if carries else scalars
        if not all(map(_ROUNDS_TO_INF.__gt__, map(abs, every))):  # NaN is not less, either
            for name, value in zip((*variant.scalars, *carries), every, strict=True):
                if abs(value) < _ROUNDS_TO_INF:
                    continue
                raise self._refuse_scalars(group, step, f"hold {name}={value:g}, not a finite fp32 number")
        return scalars, carries

    def _refuse_scalars(self, group: Mapping[str, Any], step: int, why: str) -> ShardoptError:
        others = ("foreach", "fused")  # no update reads these hints
        numbers = {key: each for key, each in group.items() if not isinstance(each, bool | str) and key not in others}
        return ShardoptError(
            f"set finite hyper-parameters within their ranges: the scalars of step {step} {why}, so params and states "
            f"would become Inf or NaN; nothing changed. The param group has {numbers}."
        )


def rule(
    *,
    scalars: ScalarFunction,
    states: tuple[str, ...] = (),
    carried: tuple[str, ...] = (),
    counts_steps: bool = True,
    nonnegative: tuple[str, ...] = (),
    tolerates: Mapping[str, str] | None = None,
    initial: Mapping[str, str] | None = None,
    of_param: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Rule]:
    """Makes a rule of a function ``(param, grad, state, s)`` or ``(param, grad, state, s, flags)``.

    Args:
        scalars: ``(group, step, carried) -> {name: float}``: hyper-parameters of the param group (plain numbers) and
            the param's step, counted from 1, to the run-time scalars that the body reads as ``s.<name>``. They are
            computed once a step in float64 on the host and rounded once to fp32, the same on every rank and for every
            chunk.
        states: names of the states, each with one value an element, which is zero at a param's first step.
        carried: names of scalars that are kept for a param and handed to ``scalars`` at its next step.
        counts_steps: True if ``state_dict()`` shows ``"step"``, as most of torch's optimizers do.
        nonnegative: states that are never below zero: in 8 bits they have no sign, and what is above zero stays so.
        tolerates: the coarsest format that a state may be stored in, ``"fp32"`` or ``"bf16"``, where that is not
            ``"int8"``: for sums that only grow, and for what is subtracted from something nearly equal.
        initial: states that ``state_dict()`` shows before a param's first step, and the key of the param group that
            tells their value, as torch's Adagrad does from its construction on. Only ``state_dict()`` and loading use
            it: at a first step the body meets zeros or this value, so give it a scalar for ``step == 1``.
        of_param: facts of each param that ``scalars`` finds in its group, and flags may ask for: ``"ndim"``, the
            number of its dimensions, ``"numel"``, that of its elements, ``"is_matrix"``, if it has two dimensions or
            more, and ``"dtype_eps"``, the distance from 1 to the next number of its dtype.

    Raises:
        RuleError: the body leaves the vocabulary; the message names file and line.
        TypeError: an argument is of another type, by its name.
    """
    if not callable(scalars):
        raise TypeError(f"scalars takes a function of (group, step, carried), found {type(scalars).__name__}.")
    states = texts(states, "states", '("momentum",)')
    carried = texts(carried, "carried", '("product",)')
    nonnegative = texts(nonnegative, "nonnegative", '("square",)')
    tolerates = mapping(tolerates, "tolerates", "{'sum': 'fp32'}")
    initial = mapping(initial, "initial", "{'sum': 'start'}")
    of_param = texts(of_param, "of_param", '("ndim",)')
    if not set(of_param) <= FACTS.keys():
        raise RuleError(f"name facts of a param among {', '.join(FACTS)} in of_param, found {of_param}.")
    counts_steps = flag(counts_steps, "counts_steps")
    names = (*states, *carried)
    for index, name in enumerate(names):
        if not name.isidentifier() or name in _RESERVED or name in names[:index]:
            raise RuleError(
                f"choose different identifiers for states and carried scalars, none of {', '.join(_RESERVED)}: "
                f"{name!r} would meet another entry of the state dict. Found the states {states} and the carried "
                f"scalars {carried}."
            )

    _check_declared(states, nonnegative, tolerates or {}, initial or {})
    if len(states) > MAX_STATES:
        raise RuleError(
            f"declare fewer states, or split the rule: found {len(states)}, and a kernel has room for {MAX_STATES}."
        )

    def decorate(function: Callable[..., Any]) -> Rule:
        tree = parse_rule(function)
        reader = RuleReader(function, tree, states)
        reader.check()
        return Rule(
            name=function.__name__,
            states=tuple(states),
            flags=tuple(name for name in reader.flags if name not in of_param),
            carried=tuple(carried),
            counts_steps=counts_steps,
            nonnegative=frozenset(nonnegative),
            tolerated=dict(tolerates or {}),
            initial=dict(initial or {}),
            takes_norms=reader.takes_norms,
            of_param=of_param,
            asked_of_param=tuple(name for name in reader.flags if name in of_param),
            scalars=scalars,
            function=function,
            tree=tree,
        )

    return decorate


def _check_declared(
    states: tuple[str, ...], nonnegative: tuple[str, ...], tolerates: Mapping[str, str], initial: Mapping[str, str]
) -> None:
    unknown = [name for name in (*nonnegative, *tolerates, *initial) if name not in states]
    if unknown or not set(tolerates.values()) <= set(_STATE_FORMATS):
        *finer, coarsest = map(repr, _STATE_FORMATS)
        raise RuleError(
            f"name only states of the rule and the formats {', '.join(finer)} and {coarsest} in nonnegative, "
            f"tolerates and initial: {unknown or 'a format'} would have no effect. Found nonnegative={nonnegative}, "
            f"tolerates={dict(tolerates)} and initial={dict(initial)}; the states are {states}."
        )


@functools.cache
def _averaging(variant: Variant) -> Variant:
    line = f"state_{EMA} = state_{EMA} + s_{_EMA_RATE} * (param - state_{EMA})"
    return replace(
        variant,
        states=(*variant.states, EMA),
        scalars=(*variant.scalars, _EMA_RATE),
        source=f"{variant.source.rstrip()}\n{line}\n",
    )


@functools.cache
def _variant(of: Rule, flag_values: tuple[bool, ...]) -> Variant:
    reader = RuleReader(of.function, of.tree, of.states)
    lines = reader.flatten(dict(zip((*of.flags, *of.asked_of_param), flag_values, strict=True)))
    states, reductions = tuple(name for name in of.states if name in reader.states_seen), tuple(reader.reductions)
    if reductions:
        read = _lines_that_count(lines, states)
        # A norm that these flags make no use of is none: there is nothing that a pass before the last would be for.
        if not any(line.startswith(f"s_{number} = ") for line in read for number in range(len(reductions))):
            lines, reductions = read, ()
    return Variant(of.name, states, tuple(reader.scalars_seen), "\n".join(lines), reductions)


def _lines_that_count(lines: Sequence[str], states: Sequence[str]) -> list[str]:
    """Returns the assignments that the new param and states depend on."""
    needed, found = {"param", *(f"state_{name}" for name in states)}, list[str]()
    for line in reversed(lines):
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        if statement.targets[0].id in needed:
            needed.remove(statement.targets[0].id)
            needed |= {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
            found.insert(0, line)
    return found
