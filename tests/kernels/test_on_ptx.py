"""The step kernels as a GPU would run them: compiled for sm_90 by a launch, executed, and equal to the native kernels.

What Triton's interpreter cannot show is in what is compiled: contraction, flushed subnormals, approximate quotients,
masks, the alignment that a launch promises, exchanges between threads. ``tests/support/ptx`` executes it. Every output
is compared bit for bit: params, masters, states and scales.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardopt.kernels import native_backend, triton_backend
from shardopt.kernels.formats import BF16
from shardopt.kernels.spec import StepSpec
from tests.kernels.test_kernels import ADAM_RULE, ADAMW, NASTY
from tests.support.cases import GRADIENTS
from tests.support.ptx.driver import Driver
from tests.support.ptx.process import Compiling
from tests.support.shards import HandmadeShard, Memory, Shape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiling() -> Iterator[Compiling]:
    """Runs a function where Triton compiles."""
    process = Compiling()
    yield process
    process.close()


class Shard(HandmadeShard):
    """Tells a driver where its gradients lie; those of skipped params are not to be read."""

    driver: Driver | None = None

    def gradients(self, memory: Memory) -> Any:
        if self.driver is not None:
            grads = zip(self.shape.members, memory.grads, strict=True)
            self.driver.memory.allow(*(grad.inner for member, grad in grads if not member.skipped))
        return super().gradients(memory)

    def check_step(self, driver: Driver) -> None:
        expected = self.launch(native_backend, CPU)
        self.driver = driver
        self.assert_same(self.launch(triton_backend, CPU), expected, "PTX")


def check(shape: Shape, spec: StepSpec, group: dict[str, Any] = ADAMW, rule: Any = ADAM_RULE, **options: Any) -> None:
    with Driver(**options) as driver:
        Shard(shape, rule, group, spec, GRADIENTS).check_step(driver)


def adamw_in_bf16() -> None:
    check(NASTY, StepSpec(ADAM_RULE.variant(ADAMW), BF16, BF16))


def test_adamw(compiling: Compiling) -> None:
    compiling(adamw_in_bf16)
