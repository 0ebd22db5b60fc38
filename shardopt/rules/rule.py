"""A rule: the arithmetic of one update, written once, as a plain Python function on fp32 scalars.

::

    @rule(scalars=my_scalars, states=("momentum",))
    def my_rule(param, grad, state, s):
        state.momentum = s.beta * state.momentum + grad
        return param - s.lr * sign(state.momentum)

The function is never called in training. Its source is parsed when it is decorated; whatever lies outside the
vocabulary is refused with its line. From that one tree come the Triton and the native kernel (``kernels/``).

What a body may hold:

* ``state.<name>`` to read and assign a state, ``s.<name>`` to read a run-time scalar of this param and step;
* local names, ``+ - * /``, one comparison at a time, ``&`` and ``|`` between comparisons, number literals;
* the words of ``rules/words.py``: ``sqrt abs sign minimum maximum clamp where``;
* ``if flags.<name>:`` (with ``not`` and ``else``), resolved before anything is compiled: the flag is the truth of the
  param group's value of that name, so ``flags.momentum`` is ``group["momentum"] != 0``;
* one ``return``, last: the new param.
"""

import ast
import builtins
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..arguments import flag, mapping, texts
from ..errors import RuleError, ShardoptError
from . import words
from .words import WORDS

# (param group, step counted from 1, what was carried from the last step) -> scalars by name, in float64.
ScalarFunction = Callable[[Mapping[str, Any], int, Mapping[str, float]], Mapping[str, float]]

_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_LOGIC: dict[type[ast.operator], str] = {ast.BitAnd: "&", ast.BitOr: "|"}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
EMA = "ema"
_EMA_RATE = "ema_rate"
_FP32_MAX, _FP32_SMALLEST = 3.4028234663852886e38, 2.0**-149
_ROUNDS_TO_INF = 2.0**128 - 2.0**103  # the least float64 that does
# Keys of a param's entry in a state dict, and names of the kernels' other streams.
_RESERVED = ("step", "master", EMA, "param", "grad")
# A native kernel tells 32 streams apart: gradient, param, master, tables, and of each state the old and the new. With
# the average of the weights that leaves room for these.
MAX_STATES = 12


@dataclass(frozen=True)
class Variant:
    """A rule with its flags resolved: straight-line source, the key under which kernels are compiled.

    ``source`` holds one assignment a line on the names ``param``, ``grad``, ``state_<name>``, ``s_<name>`` and
    ``local_<name>``, so that no name of the rule can meet one of the kernel's; it ends with ``param = ...``.
    Equal variants share their kernels.
    """

    rule: str
    states: tuple[str, ...]  # names, in torch's order
    scalars: tuple[str, ...]  # names, in order of first use
    source: str = field(repr=False)


@dataclass(frozen=True)
class Rule:
    """What the decorator :func:`rule` makes of a function."""

    name: str
    states: tuple[str, ...]  # every state that some flags may need
    flags: tuple[str, ...]  # keys of the param group whose truth the body asks for
    carried: tuple[str, ...]  # scalars handed back at the param's next step, such as NAdam's product of momenta
    counts_steps: bool  # whether torch's state dict of this optimizer holds "step"
    nonnegative: frozenset[str]  # states that are never below zero
    tolerated: Mapping[str, str] = field(repr=False, compare=False, hash=False)  # states that need more than int8
    scalars: ScalarFunction = field(repr=False)
    function: Callable[..., Any] = field(repr=False)
    tree: ast.FunctionDef = field(repr=False, compare=False, hash=False)
    average: float | None = None  # decay of the weights' moving average, where there is one
    # state -> hyper-parameter that it is filled with as soon as its param is the optimizer's; empty: at a first step
    initial: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False, hash=False)

    def averaging(self, decay: float) -> "Rule":
        r"""The same rule with a moving average of the weights as its last state, ``ema``.

        .. math::
            \bar\theta_1 = \theta_1, \qquad \bar\theta_t = \bar\theta_{t-1} + (1 - d)(\theta_t - \bar\theta_{t-1})

        of the param after its update, with its own count of steps: what ``torch.optim.swa_utils.AveragedModel`` with
        ``get_ema_multi_avg_fn(d)`` holds if it is updated after every step. A param that is not updated keeps its
        average.
        """
        # A step changes it by a thousandth of a difference, which 8 bits would round away.
        tolerated = {**self.tolerated, EMA: "bf16"}
        return replace(self, states=(*self.states, EMA), tolerated=tolerated, average=decay)

    def tolerates(self, state: str) -> str:
        """The coarsest of "fp32", "bf16" and "int8" that the state may be kept in."""
        return self.tolerated.get(state, "int8")

    def initial_values(self, group: Mapping[str, Any]) -> dict[str, float]:
        """What a param's states are filled with before its first step; empty where it has none until then."""
        kept = self.variant(group).states if self.initial else ()
        return {state: float(group[key]) for state, key in self.initial.items() if state in kept}

    def variant(self, group: Mapping[str, Any]) -> Variant:
        """The straight-line form for this param group's flags."""
        missing = [name for name in self.flags if name not in group]
        if missing:
            raise RuleError(
                f"rule {self.name!r} asks for flags.{missing[0]}, and the param group has no {missing[0]!r} (it has "
                f"{sorted(group)}): which branch to take is unknown; add it to the optimizer's defaults."
            )
        variant = _variant(self, tuple(bool(group[name]) for name in self.flags))
        return variant if self.average is None else _averaging(variant)

    def evaluate(
        self, variant: Variant, group: Mapping[str, Any], step: int, carried: Mapping[str, float]
    ) -> tuple[tuple[float, ...], dict[str, float]]:
        """The scalars of ``variant`` for one param at ``step`` (from 1), and what it carries to its next step.

        Raises:
            ShardoptError: one of them is no finite fp32 number: every param of the group would become Inf or NaN.
        """
        try:
            values = dict(self.scalars(group, step, carried))
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._refuse_scalars(group, step, f"cannot be computed ({error})") from error
        if self.average is not None:
            # The first average is the param itself: the zeros that the state begins with do not count.
            values[_EMA_RATE] = 1.0 if step == 1 else 1.0 - self.average
        try:
            scalars = tuple(float(values[name]) for name in variant.scalars)
            carries = {name: float(values[name]) for name in self.carried}
        except KeyError as error:
            raise RuleError(
                f"rule {self.name!r} needs the scalar {error}, which its scalars function did not return "
                f"(it returned {sorted(values)}): the update cannot be computed; add it to the returned dict."
            ) from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._refuse_scalars(group, step, f"are no numbers ({error})") from error
        for name, value in zip((*variant.scalars, *carries), (*scalars, *carries.values()), strict=True):
            if not abs(value) < _ROUNDS_TO_INF:
                raise self._refuse_scalars(group, step, f"hold {name}={value:g}, no finite fp32 number")
        return scalars, carries

    def _refuse_scalars(self, group: Mapping[str, Any], step: int, why: str) -> ShardoptError:
        others = ("foreach", "fused")  # hints, which no update reads
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
) -> Callable[[Callable[..., Any]], Rule]:
    """Decorate a function ``(param, grad, state, s)`` or ``(param, grad, state, s, flags)`` as an update rule.

    Args:
        scalars: ``(group, step, carried) -> {name: float}``: hyper-parameters of the param group (plain numbers) and
            the param's step, counted from 1, to the run-time scalars that the body reads as ``s.<name>``. Computed
            once a step in float64 on the host, rounded once to fp32, the same on every rank and for every chunk.
        states: names of the tensors kept for each element, zero at a param's first step.
        carried: names of scalars that are kept for a param and handed to ``scalars`` at its next step.
        counts_steps: whether ``state_dict()`` shows ``"step"``, as most of torch's optimizers do.
        nonnegative: states that are never below zero: in 8 bits they have no sign, and what is above zero stays so.
        tolerates: the coarsest format that a state may be kept in, ``"fp32"`` or ``"bf16"``, where that is not
            ``"int8"``: sums that only grow, and what is subtracted from something nearly equal.
        initial: states that ``state_dict()`` shows before a param's first step, and the key of the param group that
            tells their value, as torch's Adagrad does from its construction on. It is for those who look and load:
            the body meets zeros or this at a first step, so give it a scalar for ``step == 1``.

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
    counts_steps = flag(counts_steps, "counts_steps")
    names = (*states, *carried)
    for index, name in enumerate(names):
        if not name.isidentifier() or name in _RESERVED or name in names[:index]:
            raise RuleError(
                f"found {name!r} among the states {states} and carried scalars {carried}: it would meet another entry "
                f"of the state dict; choose different identifiers, none of {', '.join(_RESERVED)}."
            )

    _check_declared(states, nonnegative, tolerates or {}, initial or {})
    if len(states) > MAX_STATES:
        raise RuleError(
            f"found {len(states)} states; a kernel has room for {MAX_STATES}. Keep fewer, or split the rule."
        )

    def decorate(function: Callable[..., Any]) -> Rule:
        tree = _parse(function)
        reader = _Reader(function, tree, states)
        reader.check()
        return Rule(
            name=function.__name__,
            states=tuple(states),
            flags=tuple(reader.flags),
            carried=tuple(carried),
            counts_steps=counts_steps,
            nonnegative=frozenset(nonnegative),
            tolerated=dict(tolerates or {}),
            initial=dict(initial or {}),
            scalars=scalars,
            function=function,
            tree=tree,
        )

    return decorate


def _check_declared(
    states: tuple[str, ...], nonnegative: tuple[str, ...], tolerates: Mapping[str, str], initial: Mapping[str, str]
) -> None:
    unknown = [name for name in (*nonnegative, *tolerates, *initial) if name not in states]
    if unknown or not set(tolerates.values()) <= {"fp32", "bf16", "int8"}:
        raise RuleError(
            f"nonnegative={nonnegative}, tolerates={dict(tolerates)} and initial={dict(initial)} name "
            f"{unknown or 'formats'} that are no states of the rule ({states}) or no formats: it would have no effect. "
            "Formats are 'fp32', 'bf16' and 'int8'."
        )


def _parse(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise RuleError(
            f"the source of rule {getattr(function, '__name__', function)!r} cannot be read ({error}): it is "
            "translated from its text, so define it with `def` in a file or a notebook cell."
        ) from None
    tree = ast.parse(text).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise RuleError(f"a rule is written with `def`; found {type(tree).__name__} in {text.splitlines()[0]!r}.")
    return tree


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
    reader = _Reader(of.function, of.tree, of.states)
    lines = reader.flatten(dict(zip(of.flags, flag_values, strict=True)))
    return Variant(
        rule=of.name,
        states=tuple(name for name in of.states if name in reader.states_seen),
        scalars=tuple(reader.scalars_seen),
        source="\n".join(lines),
    )


class _Reader:
    """Walks a rule's tree: checks it, resolves its flags, spells it as straight-line source."""

    def __init__(self, function: Callable[..., Any], tree: ast.FunctionDef, states: tuple[str, ...]):
        self.function = function
        self.tree = tree
        self.file = inspect.getsourcefile(function) or "?"
        self.first_line = function.__code__.co_firstlineno
        self.allowed_states = states
        self.flags: dict[str, None] = {}  # an ordered set
        self.scalars_seen: dict[str, None] = {}
        self.states_seen: set[str] = set()
        self.kinds: dict[str, str] = {}  # name in the source -> "number" or "truth"
        self._name_arguments()

    def _name_arguments(self) -> None:
        arguments = self.tree.args
        names = [argument.arg for argument in arguments.args]
        extra = arguments.posonlyargs + arguments.kwonlyargs + [arguments.vararg or arguments.kwarg]
        if len(names) not in (4, 5) or any(extra) or arguments.defaults:
            raise self._refuse(self.tree, "takes (param, grad, state, s) and, where it needs them, flags")
        self.param, self.grad, self.state, self.scalar = names[:4]
        self.flag = names[4] if len(names) == 5 else None

    def _refuse(self, node: ast.AST, why: str) -> RuleError:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        text = "" if isinstance(node, ast.FunctionDef) else f" `{ast.unparse(node).splitlines()[0]}`"
        return RuleError(
            f"{self.file}:{line}: rule {self.tree.name!r}{text}: {why}. Rules are translated to Triton and to native "
            "code; shardopt.rules.rule describes what they may hold."
        )

    # -- statements ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Reads the rule under every setting of its flags: what is accepted here can be compiled with any of them."""
        self.flags = dict.fromkeys(_flag_names(self.tree, self.flag))
        for values in itertools.product((False, True), repeat=len(self.flags)):
            self.flatten(dict(zip(self.flags, values, strict=True)))

    def flatten(self, flags: Mapping[str, bool]) -> list[str]:
        self.kinds = {"param": "number", "grad": "number"}
        self.scalars_seen, self.states_seen = {}, set()
        body = self.tree.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            raise self._refuse(self.tree, "must end with `return <the new param>`")
        lines = self._statements(body[:-1], flags)
        return [*lines, f"param = {self._number(body[-1].value)}"]

    def _statements(self, statements: list[ast.stmt], flags: Mapping[str, bool]) -> list[str]:
        lines: list[str] = []
        for statement in statements:
            if isinstance(statement, ast.If):
                taken = statement.body if self._flag(statement.test, flags) else statement.orelse
                lines += self._statements(taken, flags)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                lines.append(self._assign(statement.targets[0], statement.value))
            elif isinstance(statement, ast.AugAssign):
                value = ast.BinOp(statement.target, statement.op, statement.value)
                lines.append(self._assign(statement.target, ast.copy_location(value, statement)))
            elif not isinstance(statement, ast.Pass):
                raise self._refuse(statement, "only assignments and `if flags.<name>:` may stand before the return")
        return lines

    def _assign(self, target: ast.expr, value: ast.expr) -> str:
        text, kind = self._expression(value)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == self.state:
            if kind != "number":
                raise self._refuse(value, "a state holds numbers, not truth values")
            return f"{self._state(target)} = {text}"
        if not isinstance(target, ast.Name):
            raise self._refuse(target, "assign to a local name or to state.<name>")
        if target.id in (self.state, self.scalar, self.flag):
            raise self._refuse(target, "this argument cannot be assigned")
        if target.id in WORDS:
            raise self._refuse(target, "this is a word of the vocabulary; choose another name")
        name = self._in_source(target)
        if self.kinds.setdefault(name, kind) != kind:
            raise self._refuse(target, f"this name holds a {self.kinds[name]}, here it would become a {kind}")
        return f"{name} = {text}"

    def _flag(self, test: ast.expr, flags: Mapping[str, bool]) -> bool:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._flag(test.operand, flags)
        if isinstance(test, ast.BoolOp):
            values = [self._flag(value, flags) for value in test.values]
            return all(values) if isinstance(test.op, ast.And) else any(values)
        if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == self.flag:
            return flags[test.attr]
        raise self._refuse(test, "`if` asks for flags.<name> only; to choose by a value write where(condition, x, y)")

    # -- expressions: text and kind --------------------------------------------------------------------------------

    def _number(self, node: ast.expr) -> str:
        text, kind = self._expression(node)
        if kind != "number":
            raise self._refuse(node, "a number is needed here, this is a truth value: write where(condition, 1, 0)")
        return text

    def _truth(self, node: ast.expr) -> str:
        text, kind = self._expression(node)
        if kind != "truth":
            raise self._refuse(node, "a comparison is needed here")
        return text

    def _expression(self, node: ast.expr) -> tuple[str, str]:
        if isinstance(node, ast.Constant):
            return self._literal(node, node.value), "number"
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node), "number"
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return f"({self._number(node.left)} {_ARITHMETIC[type(node.op)]} {self._number(node.right)})", "number"
        if isinstance(node, ast.BinOp) and type(node.op) in _LOGIC:
            return f"({self._truth(node.left)} {_LOGIC[type(node.op)]} {self._truth(node.right)})", "truth"
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Compare):
            if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARISONS:
                raise self._refuse(node, "write one of < <= > >= == != at a time, joined by & or |")
            symbol = _COMPARISONS[type(node.ops[0])]
            return f"({self._number(node.left)} {symbol} {self._number(node.comparators[0])})", "truth"
        if isinstance(node, ast.Call):
            return self._call(node), "number"
        raise self._refuse(node, f"{type(getattr(node, 'op', node)).__name__} is not in the vocabulary")

    def _unary(self, node: ast.UnaryOp) -> tuple[str, str]:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return f"-{self._literal(node, node.operand.value)}", "number"
        if isinstance(node.op, ast.USub):
            # Triton's unary minus is 0 - x and NumPy's flips the sign bit: they differ for +0. One spelling for all.
            return f"(0.0 - {self._number(node.operand)})", "number"
        raise self._refuse(node, f"{type(node.op).__name__} is not in the vocabulary")

    def _literal(self, node: ast.expr, value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refuse(node, "literals are numbers")
        if not value <= _FP32_MAX:
            raise self._refuse(node, "this literal is not a finite fp32 number")
        if 0 < value < _FP32_SMALLEST:
            raise self._refuse(node, "this literal would be 0 in fp32")
        return repr(float(value))

    def _name(self, node: ast.Name) -> tuple[str, str]:
        name = self._in_source(node)
        if name not in self.kinds:
            raise self._refuse(
                node,
                "this name is not defined in the rule (with these flags); names from outside cannot be read: hand the "
                "value over as a scalar, or write the literal",
            )
        return name, self.kinds[name]

    def _in_source(self, node: ast.Name) -> str:
        return {self.param: "param", self.grad: "grad"}.get(node.id, f"local_{node.id}")

    def _attribute(self, node: ast.Attribute) -> str:
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        if owner == self.state:
            return self._state(node)
        if owner == self.scalar:
            self.scalars_seen[node.attr] = None
            return f"s_{node.attr}"
        if owner is not None and owner == self.flag:
            raise self._refuse(node, "flags may only be asked by `if flags.<name>:`")
        raise self._refuse(node, "only state.<name> and s.<name> can be read")

    def _state(self, node: ast.Attribute) -> str:
        if node.attr not in self.allowed_states:
            raise self._refuse(node, f"{node.attr!r} is not among the declared states {self.allowed_states}")
        self.states_seen.add(node.attr)
        return f"state_{node.attr}"

    def _call(self, node: ast.Call) -> str:
        word = node.func.id if isinstance(node.func, ast.Name) else None
        if word not in WORDS or node.keywords:
            raise self._refuse(node, f"only {', '.join(WORDS)} can be called, without keywords")
        bound = _bound(self.function, word)
        if bound not in (None, getattr(words, word), getattr(builtins, word, None)):
            raise self._refuse(node, f"{word} is {bound!r} here, not the word; import it from shardopt.rules")
        if len(node.args) != WORDS[word]:
            raise self._refuse(node, f"{word} takes {WORDS[word]} arguments")
        texts = [
            self._truth(argument) if word == "where" and index == 0 else self._number(argument)
            for index, argument in enumerate(node.args)
        ]
        return f"{word}({', '.join(texts)})"


def _flag_names(tree: ast.FunctionDef, flag: str | None) -> list[str]:
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == flag
    ]


def _bound(function: Callable[..., Any], name: str) -> object:
    """What a name means where the function was written; None where it means nothing."""
    if name in function.__code__.co_freevars and function.__closure__:
        try:
            return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
        except ValueError:  # not assigned yet
            return None
    return function.__globals__.get(name)
