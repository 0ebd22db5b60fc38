"""Every kernel of the package is executed as compiled, by a test that is named here, or exempt with a reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shardopt.kernels import triton_backend
from tests.kernels import test_margins, test_on_ptx, test_passes
from tests.support.paths import ROOT
from tests.support.ptx.process import Compiling

STEPS, SUMS = "test_every_rule_and_format", "test_reductions"
PASSES = "test_every_pass_as_compiled"
MARGINS, PRODUCTS = "test_sums_as_compiled", "test_products_as_compiled"
# The test -> its file; others are of test_on_ptx.py.
FILES = {PASSES: test_passes, MARGINS: test_margins, PRODUCTS: test_margins}
# What Triton compiles -> the test that executes it.
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
# What a backend is asked for -> the test that does, or why none does.
ENTRIES = {"run": STEPS, "add_totals": SUMS, "count_nonfinite": SUMS, "add_margin_sums": MARGINS}
EXEMPT = {
    "prepare": "passes over one skipped block, launched for what they compile",
    "prepare_margin_sums": "sums of a few zeros",
    "joins_shards": "a fact",
}
# Rules that together use every word, each in one format.
CASES = ("AdamW", "Adagrad", "Lion", "Rprop")


def jit_functions() -> Iterator[tuple[str, Path, range]]:
    """Yields the name, the file and the lines of every function that Triton compiles, or that hands one to it."""
    for path in sorted((ROOT / "shardopt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(map(is_jit, ast.walk(node))):
                yield f"{path.stem}.{node.name}", path, range(node.lineno, 1 + (node.end_lineno or 0))


def is_jit(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in ("triton.jit", "jit")


def test_every_kernel_has_a_row() -> None:
    assert {name for name, _, _ in jit_functions()} == EXECUTED.keys()
    assert set(triton_backend.__all__) == ENTRIES.keys() | EXEMPT.keys()
    for test in {*EXECUTED.values(), *ENTRIES.values()}:
        assert callable(getattr(FILES.get(test, test_on_ptx), test)), test


def test_what_is_said_to_be_executed_is(compiling: Compiling) -> None:
    """By the lines of the source that the executed kernels name."""
    texts: dict[str, set[str]] = {
        STEPS: compiling(test_on_ptx.in_rows, [row for row in test_on_ptx.first_rows() if row[0] in CASES]),
        SUMS: compiling(test_on_ptx.in_reductions, 1),
        PASSES: compiling(test_passes.in_rows, (test_passes.SPECIAL,), ("LAMB in 8 bits",)),
        MARGINS: compiling(test_margins.in_sums, [("fp32", "log_uniform")]),
        PRODUCTS: compiling(test_margins.in_products, ["fp32"]),
    }
    lines = {
        test: {(file, int(line)) for text in each for file, line in re.findall(r'loc\("([^"]+)":(\d+):', text)}
        for test, each in texts.items()
    }
    for name, path, span in jit_functions():
        if name not in MAKERS:
            assert any((str(path), line) in lines[EXECUTED[name]] for line in span), name
    assert len({file for file, _ in lines[STEPS] if file.startswith("<shardopt triton ")}) >= len(CASES)
