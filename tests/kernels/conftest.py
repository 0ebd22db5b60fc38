"""What the tests of compiled kernels share."""

from collections.abc import Iterator

import pytest

from tests.support.ptx.process import Compiling


@pytest.fixture(scope="session")
def compiling() -> Iterator[Compiling]:
    """Runs functions in the process in which Triton compiles."""
    process = Compiling()
    yield process
    process.close()
