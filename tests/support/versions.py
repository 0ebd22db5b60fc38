"""What tests cannot do with the oldest supported versions; the package itself works with them."""

import pytest
import torch
import triton
from packaging.version import Version

_IS_OLD_TRITON = Version(triton.__version__) < Version("3.7")
needs_the_interpreter_of_new_triton = pytest.mark.skipif(
    _IS_OLD_TRITON, reason="the interpreter of Triton 3.6 runs no loop whose bounds are loaded"
)
needs_the_ptx_of_new_triton = pytest.mark.skipif(
    _IS_OLD_TRITON, reason="Triton 3.6 emits instructions that tests/support/ptx does not know"
)
needs_full_tensors_of_any_strides = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="full_tensor() of torch 2.11 takes contiguous parts only"
)
