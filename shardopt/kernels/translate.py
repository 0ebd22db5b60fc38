"""Translates the straight-line source of a rule's pass to the text of a native loop body and of a Triton function.

Both are printed from one parsed tree, statement by statement, in the order in which the rule was written. Only the
spelling differs: Triton's plain ``/`` and ``sqrt`` compile to approximations, so they become ``div_rn`` and
``sqrt_rn``; Numba's bare literals are float64, so they become ``f32(...)``.
"""

import ast
import hashlib
import linecache
import types
from collections.abc import Callable, Mapping
from typing import Any


def native_lines(source: str) -> list[str]:
    """Returns the source of a pass as statements on fp32 scalars, for the inside of the native kernel's loop."""
    return _spell(source, _Native())


def triton_lines(source: str) -> list[str]:
    """Returns the source of a pass as statements on tiles."""
    return _spell(source, _Triton())


def function_from_source(text: str, kind: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the one function that ``text`` defines, with ``names`` as its globals.

    The text is shardopt's own, printed from a checked tree. ``linecache`` gets it because Triton reads a kernel through
    ``inspect``, and for tracebacks. Nothing is run here: the function's code object is taken out of the compiled
    module.
    """
    file = f"<shardopt {kind} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = compile(text, file, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, types.CodeType))
    function = types.FunctionType(code, {**names, "__name__": __name__, "__builtins__": {"range": range}}, code.co_name)
    function.__module__ = __name__
    return function


def _spell(source: str, transformer: ast.NodeTransformer) -> list[str]:
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(source)))
    return [ast.unparse(statement) for statement in tree.body]


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.parse(name, mode="eval").body, list(arguments), [])


class _Native(ast.NodeTransformer):
    def visit_Constant(self, node: Any) -> ast.expr:
        return _call("f32", node)

    visit_UnaryOp = visit_Constant  # only literals are negated in a variant's source


class _Triton(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _call("tl.div_rn", node.left, node.right) if isinstance(node.op, ast.Div) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = {"sqrt": "tl.sqrt_rn", "abs": "tl.abs", "where": "tl.where", "fma": "tl.fma"}
        assert isinstance(node.func, ast.Name)
        return _call(name.get(node.func.id, node.func.id), *node.args)
