"""Mutants of a file: one small change each, as a careless programmer would make it, written into the text in place."""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_DTYPES = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float16": "bfloat16",
    "int64": "int32",
    "int32": "int64",
    "uint16": "int16",
    "int16": "uint16",
    "uint8": "int8",
    "int8": "uint8",
}
_DTYPE_MODULES = {"torch", "tl", "np", "types"}
_RANKS = {"rank", "group_rank", "global_rank", "local_rank", "src", "dst"}
_WAITS = {
    "wait",
    "synchronize",
    "barrier",
    "finish",
    "join",
    "drain",
    "wait_idle",
    "wait_for_copies",
    "after_writes",
    "wait_loaded",
    "settle",
    "flush",
    "fsync",
    "record",
    "wait_stream",
}
_COLLECTIONS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Dict, ast.Set)
_TYPES = {"int", "float", "str", "bool", "bytes", "dict", "list", "tuple", "set"}


@dataclass(frozen=True)
class Mutant:
    """Whole lines of a file, before and after."""

    file: str  # relative to the checkout
    line: int  # the first of them
    kind: str
    before: str
    after: str
    first: int  # of the statement, or of the head of the block, that they are in
    last: int
    is_cached: bool  # in a function whose results are kept: the first test in a process runs it, for all others

    def moved_to(self, source: str) -> "Mutant | None":
        """Where its lines are now, nearest by if there are several such. None: they are gone."""
        lines, before = source.splitlines(), self.before.splitlines()
        found = [at for at in range(1, len(lines) + 1) if lines[at - 1 : at - 1 + len(before)] == before]
        if not found:
            return None
        by = min((at - self.line for at in found), key=abs)
        return replace(self, line=self.line + by, first=self.first + by, last=self.last + by)

    def apply(self, source: str) -> str:
        """The mutated file; the lines stand where they stood."""
        lines, after = source.splitlines(), self.line - 1 + len(self.before.splitlines())
        return "\n".join([*lines[: self.line - 1], *self.after.splitlines(), *lines[after:]]) + "\n"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All of them, in the order of the text."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(dict.fromkeys(finder.found), key=lambda each: (each.line, each.kind, each.after))


def draw(candidates: Iterable[Mutant], seed: int, count: int) -> list[Mutant]:
    """``count`` of them: each folder has its share by lines and one at least, each kind the same; one on a line."""
    dice = random.Random(seed)
    folders: dict[str, list[Mutant]] = defaultdict(list)
    for each in candidates:
        folders[str(PurePath(each.file).parent)].append(each)
    lines = {folder: len({(each.file, each.line) for each in folders[folder]}) for folder in sorted(folders)}
    exact = {folder: count * lines[folder] / sum(lines.values()) for folder in lines}
    shares = {folder: max(int(exact[folder]), 1) for folder in lines}
    for folder in sorted(lines, key=lambda each: exact[each] % 1, reverse=True):
        shares[folder] += sum(shares.values()) < count
    drawn = [each for folder in lines for each in _draw_kinds(folders[folder], dice, shares[folder])]
    return sorted(drawn[:count], key=lambda each: (each.file, each.line))


def _draw_kinds(candidates: list[Mutant], dice: random.Random, count: int) -> list[Mutant]:
    kinds = sorted({each.kind for each in candidates})
    piles = {kind: [each for each in candidates if each.kind == kind] for kind in kinds}
    dice.shuffle(kinds)
    for kind in kinds:
        dice.shuffle(piles[kind])
    drawn: dict[tuple[str, int], Mutant] = {}
    while len(drawn) < count and any(piles.values()):
        for pile in (piles[kind] for kind in kinds):
            while pile and (pile[-1].file, pile[-1].line) in drawn:
                pile.pop()
            if pile and len(drawn) < count:
                each = pile.pop()
                drawn[each.file, each.line] = each
    return list(drawn.values())


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.lines = source.splitlines()
        self.found: list[Mutant] = []
        self.span = (1, 1)
        self.is_cached = False

    # -- places in the text

    def text(self, node: ast.expr) -> str:
        return "\n".join(self.between((node.lineno, node.col_offset), _end(node)))

    def between(self, start: tuple[int, int], end: tuple[int, int]) -> list[str]:
        lines = self.lines[start[0] - 1 : end[0]]
        lines[-1] = lines[-1][: end[1]]
        lines[0] = lines[0][start[1] :]
        return lines

    def add(self, kind: str, start: tuple[int, int], end: tuple[int, int], text: str) -> None:
        lines = self.lines[start[0] - 1 : end[0]]
        after = lines[0][: start[1]] + text + lines[-1][end[1] :]
        self.found.append(Mutant(self.file, start[0], kind, "\n".join(lines), after, *self.span, self.is_cached))

    def replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        self.add(kind, (node.lineno, node.col_offset), _end(node), text)

    def swap(self, kind: str, left: ast.expr, right: ast.expr, words: tuple[str, str]) -> None:
        """One operator between two operands, which may stand on different lines, in parentheses of their own."""
        pattern = re.compile(re.escape(words[0]).replace(r"\ ", r"\s+"))
        gap = self.between(_end(left), (right.lineno, right.col_offset))
        for index, line in enumerate(gap):
            match = pattern.search(line.partition("#")[0])
            if match is not None:
                number, before = left.end_lineno or 0, (left.end_col_offset or 0) if index == 0 else 0
                start, end = before + match.start(), before + match.end()
                self.add(kind, (number + index, start), (number + index, end), words[1])
                return

    # -- what is left alone: annotations, decorators, messages

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        outside, body = self.span, getattr(node, "body", None)
        last = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
        self.span = (node.lineno, last)
        super().visit(node)
        self.span = outside

    def visit_each(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self.is_cached
        self.is_cached |= any(_name(each) in ("cache", "lru_cache") for each in node.decorator_list)
        if node.name not in ("__repr__", "__str__"):
            self.visit_each(*node.args.defaults, *node.args.kw_defaults, *node.body)
        self.is_cached = outside

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_each(*node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_each(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # the positions inside are not those of the text before Python 3.12

    # -- what is changed

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool | int | float):
            changed = not node.value if isinstance(node.value, bool) else node.value + 1
            self.replace("constant", node, repr(changed))

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.swap("comparison", left, right, _COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.replace("dropped wait" if _name(node.value.func) in _WAITS else "dropped call", node, "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        name = _name(node.test)
        if name != "TYPE_CHECKING":
            self.negate(node.test)
            self.visit_each(node.test, *node.body)
        self.visit_each(*node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        self.replace("swapped branches", test, f"not ({self.text(test)})")

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in filter(None, (node.lower, node.upper)):
            self.shift(bound)
        self.generic_visit(node)

    def shift(self, bound: ast.expr) -> None:
        text = self.text(bound)
        is_one_word = isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
        self.replace("offset", bound, f"{text} + 1" if is_one_word else f"({text}) + 1")

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name == "range":
            for bound in node.args[:2]:
                if not isinstance(bound, ast.Starred):
                    self.shift(bound)
        if name == "get_rank":
            self.wrong_rank(node)
        if "warn" not in name:
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATORS and not any(map(_is_not_number, (node.left, node.right))):
            self.swap("arithmetic", node.left, node.right, _OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _OPERATORS and not _is_not_number(node.value):
            before, after = _OPERATORS[type(node.op)]
            self.swap("arithmetic", node.target, node.value, (f"{before}=", f"{after}="))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap("and, or", left, right, words)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.replace("returned None", node.value, "None")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _RANKS and isinstance(node.ctx, ast.Load):
            self.wrong_rank(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _RANKS and isinstance(node.ctx, ast.Load):
            self.wrong_rank(node)
        if node.attr in _DTYPES and _name(node.value) in _DTYPE_MODULES:
            self.replace("dtype", node, f"{self.text(node.value)}.{_DTYPES[node.attr]}")
        if not isinstance(node.value, ast.Name):
            self.visit(node.value)

    def wrong_rank(self, node: ast.expr) -> None:
        self.replace("rank", node, "0")
        self.replace("rank", node, f"abs({self.text(node)} - 1)")  # another one, which exists wherever there are two


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_not_number(node: ast.expr) -> bool:
    """A text, a collection, or a type in a union."""
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, str | bytes)
    return isinstance(node, _COLLECTIONS) or _name(node) in _TYPES or _name(node)[:1].isupper()
