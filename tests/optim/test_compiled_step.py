"""A train step that is compiled as a whole, with its backward and ``step()``, trains as an eager one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from shardopt import ShardedAdamW
from tests.support.training import raises


def trained(opt_of: Any, full: bool = False) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    opt = opt_of(model)
    before = model.weight.detach().clone()

    def step(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        opt.step()
        return loss

    compiled = step if isinstance(opt, torch.optim.AdamW) else torch.compile(step, backend="eager", fullgraph=full)
    try:
        for number in range(3):
            compiled(torch.randn(2, 40, generator=torch.Generator().manual_seed(number)))
    except Unsupported:
        assert torch.equal(model.weight, before) and model.weight.grad is None and not opt.state, "it has begun"
        raise
    return model.weight.detach()


@pytest.mark.parametrize(
    "handed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["params alone", "with the module"]
)
@pytest.mark.filterwarnings("ignore:Dynamo", "ignore:Profiler", "ignore:The .grad attribute")
def test_a_step_that_is_compiled_whole(handed: bool) -> None:
    def of(model: nn.Module) -> ShardedAdamW:
        return ShardedAdamW(model, stage=2) if handed else ShardedAdamW(model.parameters())

    expected = trained(lambda model: torch.optim.AdamW(model.parameters()))
    torch.testing.assert_close(trained(of), expected, rtol=0, atol=1e-6)
    with raises(Unsupported, "call optimizer.zero_grad() after the compiled function", "fullgraph=True"):
        trained(of, full=True)
