"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch
from ranks import Pool

if not torch.cuda.is_available():
    # Read when Triton is imported: its kernels then run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that tests run functions of several ranks on."""
    pool = Pool()
    yield pool
    pool.close()
