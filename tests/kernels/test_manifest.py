"""Every kernel of the package has a test that executes it as compiled, or is exempt with a reason.

``tests/support/ptx/executed.py`` has the rows; each test that they name checks that it executes what is said of it.
"""

import inspect

from shardopt.kernels import triton_backend
from tests.kernels import test_margins, test_on_ptx, test_passes
from tests.support.ptx.executed import EXECUTED, MARGINS, PASSES, PRODUCTS, STEPS, SUMS, jit_functions

# The test -> its file; others are of test_on_ptx.py.
FILES = {PASSES: test_passes, MARGINS: test_margins, PRODUCTS: test_margins}
# What a backend is asked for -> the test that does, or why none does.
ENTRIES = {"run": STEPS, "add_totals": SUMS, "count_nonfinite": SUMS, "add_margin_sums": MARGINS}
EXEMPT = {
    "prepare": "passes over one skipped block, launched for what they compile",
    "prepare_margin_sums": "sums of a few zeros",
    "joins_shards": "a fact",
}


def test_every_kernel_has_a_row() -> None:
    assert jit_functions().keys() == EXECUTED.keys()
    assert set(triton_backend.__all__) == ENTRIES.keys() | EXEMPT.keys()
    for test in {*EXECUTED.values(), *ENTRIES.values()}:
        assert "check_executed(" in inspect.getsource(getattr(FILES.get(test, test_on_ptx), test)), test
