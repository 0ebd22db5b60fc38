"""Files that share a dear process are of one place; every other file is one of its own."""

from tests.support.together import place_of


def test_places() -> None:
    assert place_of("tests/kernels/test_on_ptx.py::test_reductions[15]") == "compiling"
    assert place_of("tests/kernels/test_margins.py::test_sums_as_compiled") == "compiling"
    assert place_of("tests/integrations/test_peft.py::test_dora") == "frameworks"
    assert place_of("tests/domain/test_quantized_bases.py::test_it") == "frameworks"
    assert place_of("tests/step/test_parity.py::test_single_steps[SGD]") == "tests/step/test_parity.py"
