"""What Triton compiles, and the test that executes it as compiled.

A test that is named here hands what it executed to :func:`check_executed`; test_manifest.py holds that every kernel
has a row.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

STEPS, SUMS = "test_steps_execute_every_function", "test_reductions"
PASSES = "test_every_pass_as_compiled"
MARGINS, PRODUCTS = "test_sums_as_compiled", "test_products_as_compiled"
EXECUTED = {
    "triton_streams.stream_at": STEPS,
    "triton_step.keep": STEPS,
    "triton_step.kept": PASSES,
    "triton_step.step_kernel": STEPS,
    "triton_step.pass_function": STEPS,  # makes a function of each pass
    "triton_words.sign": STEPS,
    "triton_words.minimum": STEPS,
    "triton_words.maximum": STEPS,
    "triton_words.clamp": STEPS,
    "triton_words.load_bf16": STEPS,
    "triton_words.widen": STEPS,
    "triton_words.narrow": STEPS,
    "triton_formats.bits_of": STEPS,
    "triton_formats.from_bits": STEPS,
    "triton_formats.shr": STEPS,
    "triton_formats.one_nan_bits": STEPS,
    "triton_formats.follow": STEPS,
    "triton_formats.join": STEPS,
    "triton_formats.part_master": STEPS,
    "triton_formats.draw": STEPS,
    "triton_formats.dither": STEPS,
    "triton_formats.narrow_up": STEPS,
    "triton_formats.load_codes": STEPS,
    "triton_formats.store_codes": STEPS,
    "triton_formats.decode": STEPS,
    "triton_formats.encode": STEPS,
    "triton_reductions.load_gradients": SUMS,
    "triton_reductions.sums_of": SUMS,
    "triton_reductions.sum_of_squares": SUMS,
    "triton_reductions.row_of_block_sums": SUMS,
    "triton_reductions.add_to_row": SUMS,
    "triton_reductions.totals_kernel": SUMS,
    "triton_reductions.count_nonfinite_kernel": SUMS,
    "triton_products.carried": PRODUCTS,
    "triton_products.product_of": PRODUCTS,
    "triton_margins.row_of_program": MARGINS,
    "triton_margins.place_of": MARGINS,
    "triton_margins.squares_of": MARGINS,
    "triton_margins.folded": MARGINS,
    "triton_margins.margin_parts_kernel": MARGINS,
    "triton_margins.add_parts_kernel": MARGINS,
    "triton_margins.side_sums_kernel": MARGINS,
}
MAKERS = ("triton_step.pass_function",)  # whose functions have lines of their own


@cache
def jit_functions() -> dict[str, tuple[Path, range]]:
    """The file and the lines of every function that Triton compiles, or that hands one to it, by its name."""
    return {
        f"{path.stem}.{node.name}": (path, range(node.lineno, 1 + (node.end_lineno or 0)))
        for path in sorted((ROOT / "shardopt").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any(map(is_jit, ast.walk(node)))
    }


def is_jit(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", None))
    return name == "jit" and ast.unparse(node) in ("triton.jit", "jit")


def check_executed(test: str, texts: Iterable[str]) -> set[tuple[str, int]]:
    """By the lines of the source that the executed kernels name, which it returns."""
    lines = {(file, int(line)) for text in texts for file, line in re.findall(r'loc\("([^"]+)":(\d+):', text)}
    for name, (path, span) in jit_functions().items():
        if EXECUTED.get(name) == test and name not in MAKERS:
            assert any((str(path), line) in lines for line in span), f"{test} does not execute {name}"
    return lines
