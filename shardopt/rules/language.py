"""The language of rules: reads the body of a rule, refuses what lies outside the vocabulary, and flattens its flags.

The docstring of ``rule.py`` says what a body may hold. What this file accepts, ``kernels/translate.py`` can spell for
Triton and for Numba.
"""

import ast
import builtins
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import RuleError
from . import words
from .words import REDUCTIONS, WORDS

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
_FP32_MAX, _FP32_SMALLEST = 3.4028234663852886e38, 2.0**-149


def parse_rule(function: Callable[..., Any]) -> ast.FunctionDef:
    """Returns the tree of a function's source.

    Raises:
        RuleError: the source cannot be read, or is no ``def``.
    """
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise RuleError(
            f"the source of rule {getattr(function, '__name__', function)!r} cannot be read ({error}): it is "
            "translated from its text, so define it with `def` in a file or a notebook cell."
        ) from None
    tree = ast.parse(text).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise RuleError(f"write a rule with `def`: found {type(tree).__name__} in {text.splitlines()[0]!r}.")
    return tree


class RuleReader:
    """Walks a rule's tree: checks it, resolves its flags, spells it as straight-line source.

    Attributes:
        flags: names of all flags that the body asks for, in order; from :meth:`check` on.
        scalars_seen: names of the scalars that the last flattened form reads, in order of first use.
        states_seen: names of the states that it reads or writes.
        reductions: the words on all elements of the param that it calls, in order. The result of call ``k`` is named
            ``s_<k>``, which no scalar of the user can be named.
        takes_norms: True if it calls one under any setting of the flags; from :meth:`check` on.
    """

    def __init__(self, function: Callable[..., Any], tree: ast.FunctionDef, states: tuple[str, ...]):
        self.function = function
        self.tree = tree
        self.file = inspect.getsourcefile(function) or "?"
        self.first_line = function.__code__.co_firstlineno
        self.allowed_states = states
        self.flags: dict[str, None] = {}  # an ordered set
        self.scalars_seen: dict[str, None] = {}
        self.states_seen: set[str] = set()
        self.reductions: list[str] = []
        self.takes_norms = False
        self._ahead: list[str] = []  # assignments that the next statement needs before it
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
        """Reads the rule under every setting of its flags: an accepted rule can be compiled with any of them."""
        self.flags = dict.fromkeys(_flag_names(self.tree, self.flag))
        for values in itertools.product((False, True), repeat=len(self.flags)):
            self.flatten(dict(zip(self.flags, values, strict=True)))
            self.takes_norms |= bool(self.reductions)

    def flatten(self, flags: Mapping[str, bool]) -> list[str]:
        """Returns the straight-line source under one setting of the flags, a list of assignments."""
        self.kinds = {"param": "number", "grad": "number"}
        self.scalars_seen, self.states_seen, self.reductions, self._ahead = {}, set(), [], []
        body = self.tree.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            raise self._refuse(self.tree, "must end with `return <the new param>`")
        lines = self._statements(body[:-1], flags)
        param = f"param = {self._number(body[-1].value)}"
        return [*lines, *self._take_ahead(), param]

    def _statements(self, statements: list[ast.stmt], flags: Mapping[str, bool]) -> list[str]:
        lines: list[str] = []
        for statement in statements:
            if isinstance(statement, ast.If):
                taken = statement.body if self._flag(statement.test, flags) else statement.orelse
                lines += self._statements(taken, flags)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                assignment = self._assign(statement.targets[0], statement.value)
                lines += [*self._take_ahead(), assignment]
            elif isinstance(statement, ast.AugAssign):
                value = ast.BinOp(statement.target, statement.op, statement.value)
                assignment = self._assign(statement.target, ast.copy_location(value, statement))
                lines += [*self._take_ahead(), assignment]
            elif not isinstance(statement, ast.Pass):
                raise self._refuse(statement, "only assignments and `if flags.<name>:` may stand before the return")
        return lines

    def _take_ahead(self) -> list[str]:
        ahead, self._ahead = self._ahead, []
        return ahead

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
        if target.id in WORDS or target.id in REDUCTIONS:
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
        takes = {**WORDS, **REDUCTIONS}
        if word not in takes or node.keywords:
            raise self._refuse(node, f"only {', '.join(takes)} can be called, without keywords")
        bound = _bound(self.function, word)
        if bound not in (None, getattr(words, word), getattr(builtins, word, None)):
            raise self._refuse(node, f"{word} is {bound!r} here, not the word; import it from shardopt.rules")
        if len(node.args) != takes[word]:
            raise self._refuse(node, f"{word} takes {takes[word]} arguments")
        texts = [
            self._truth(argument) if word == "where" and index == 0 else self._number(argument)
            for index, argument in enumerate(node.args)
        ]
        if word in REDUCTIONS:
            result = f"s_{len(self.reductions)}"
            self.reductions.append(word)
            self._ahead.append(f"{result} = {word}({texts[0]})")
            return result
        return f"{word}({', '.join(texts)})"


def _flag_names(tree: ast.FunctionDef, flag: str | None) -> list[str]:
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == flag
    ]


def _bound(function: Callable[..., Any], name: str) -> object:
    """Returns the value of a name where the function was written; None if it has none there."""
    if name in function.__code__.co_freevars and function.__closure__:
        try:
            return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
        except ValueError:  # not assigned yet
            return None
    return function.__globals__.get(name)
