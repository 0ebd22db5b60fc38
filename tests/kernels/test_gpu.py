"""On a GPU: the compiled Triton kernel gives the bits of the native one, alone and inside of whole optimizers."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import shardopt
from shardopt.tools.twins import compare
from tests.support.cases import CASES
from tests.support.chain import train_chain
from tests.support.ranks import Pool
from tests.support.through_host import through_host
from tests.support.training import raw
from tests.support.without_gpu import sized

pytestmark = pytest.mark.gpu

NAMES = [case.name for case in CASES]
# Every flag that changes the arithmetic.
FLAGS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_shard(name: str, dtype: torch.dtype) -> None:
    for keywords in ({}, FLAGS.get(name, {})):
        optimizer = getattr(shardopt, f"Sharded{name}")([torch.zeros(1)], **keywords)
        groups = [dict(optimizer.defaults), {**optimizer.defaults, "lr": 0.5 * optimizer.defaults["lr"]}]
        assert {
            name: different for name, (_, different) in compare(optimizer.rule, groups, dtype).items() if different
        } == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "Adafactor"])
def test_whole_optimizers(name: str, dtype: torch.dtype) -> None:
    """Params of many shapes, two groups, one param without a gradient at some steps, clipping, an overflow skipped."""
    ends = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        shapes: list[tuple[int, ...]] = [(), (0,), (1,), (257,), (64, 33), (3, 5, 7, 2)]
        params = [Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.003}]
        keywords = {"lr": 0.01, **FLAGS.get(name, {})}
        optimizer = getattr(shardopt, f"Sharded{name}")(groups, max_grad_norm=1.0, **keywords)
        for step in range(6):
            for index, param in enumerate(params):
                grad = torch.randn(param.shape, generator=generator)
                param.grad = None if index == 4 and step in (1, 3) else grad.to(dtype).to(device)
            optimizer.step()
        tensors = [*params, *(value for state in optimizer.state.values() for value in state.values())]
        ends.append([each.detach().float().cpu() for each in tensors])
    for cpu, cuda in zip(*ends, strict=True):
        assert torch.equal(cpu.view(torch.int32), cuda.view(torch.int32))


def test_a_step_waits_for_nothing_but_its_decision() -> None:
    """Gradients may be freed right after the step: their memory is not reused before the kernel has read them."""
    param = Parameter(torch.zeros(sized(1 << 24, 1 << 18), device="cuda"))
    optimizer = shardopt.ShardedSGD([param], lr=1.0, tuning=shardopt.Tuning(nonfinite="propagate"))
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
        param.grad = None
        torch.full_like(param, float("nan"))
    assert torch.equal(param, torch.full_like(param, -5.0))


def trains(stage: int, device: str, offload: Any = None) -> list[bytes]:
    with through_host() if device == "cuda" else nullcontext():
        return train_chain(stage, device, offload)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(ranks: Pool, stage: int) -> None:
    """One rank, and two that share the GPU: sums are ours, so they have the bits of the CPU's."""
    for world in (1, 2):
        on_cpu, on_cuda = (ranks.run(trains, stage, device, world=world) for device in ("cpu", "cuda"))
        assert on_cuda == on_cpu
        assert all(each == on_cpu[0] for each in on_cpu)


# -- states elsewhere --------------------------------------------------------------------------------------------------


def rests(name: str, dtype: torch.dtype, offload: Any) -> tuple[list[bytes], dict[str, Any]]:
    """Steps of params that take several chunks; with a state dict saved and loaded in between."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(257,), (64, 33), (300, 700), (), (5000,)]
    params = [Parameter(torch.randn(shape, generator=generator).to(dtype).cuda()) for shape in shapes]
    tuning = shardopt.Tuning(chunk_bytes=64 << 10, bucket_bytes=200_000)
    optimizer = getattr(shardopt, f"Sharded{name}")(params, lr=0.01, offload=offload, tuning=tuning)
    for step in range(8):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    tensors = [*params, *(value for state in optimizer.state.values() for value in state.values())]
    found, memory = [raw(each.detach().cpu()) for each in tensors], optimizer.memory()
    optimizer.close()
    return found, memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adagrad", "Adafactor"])
def test_states_elsewhere_leave_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected, _ = rests(name, dtype, None)
    ways = [shardopt.Offload(step=step, pin_memory=pins) for step in ("gpu", "cpu") for pins in (True, False)]
    for offload in ("cpu", *ways, tmp_path):
        found, memory = rests(name, dtype, offload)
        assert found == expected, offload
        if name != "SGD":  # which keeps no state without momentum
            assert memory["state"]["disk" if offload is tmp_path else "host"] > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_with_states_elsewhere(ranks: Pool, stage: int, tmp_path: Path) -> None:
    root = str(tmp_path)
    ways: list[Any] = ["cpu", shardopt.Offload(step="cpu"), shardopt.Offload(step="gpu"), root]
    if stage >= 2:
        ways += [shardopt.Offload(gradients="cpu", step=step) for step in ("auto", "cpu", "gpu")]
        ways += [shardopt.Offload(root, gradients="cpu")]
    if stage == 3:
        ways += [shardopt.Offload(params="cpu"), shardopt.Offload(root, params=root)]
    for world in (1, 2):
        expected = ranks.run(trains, stage, "cpu", world=world)
        for offload in ways:
            assert ranks.run(trains, stage, "cuda", offload, world=world) == expected, offload


def test_offload_frees_the_device_and_reload_takes_it_back() -> None:
    param = Parameter(torch.zeros(sized(64 << 20, 1 << 20), device="cuda"))
    optimizer = shardopt.ShardedAdamW([param])
    expected = shardopt.ShardedAdamW([Parameter(param.detach().clone())])
    other = expected.param_groups[0]["params"][0]

    def step() -> None:
        for each, one in ((param, optimizer), (other, expected)):
            each.grad = torch.full_like(each, 0.25)
            one.step()
            each.grad = None

    step()
    torch.cuda.synchronize()
    full = torch.cuda.memory_allocated()
    optimizer.offload()
    assert full - torch.cuda.memory_allocated() > 0.9 * 2 * param.nbytes
    step()  # states stream through the device
    optimizer.reload()
    step()
    assert torch.equal(param, other)


def released(device: str, release_gradients: bool) -> list[bytes]:
    """What three steps leave of a model whose last layers are updated while its first still run backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).bfloat16().to(device)
    opt = shardopt.ShardedAdamW(
        model,
        lr=0.01,
        master="split24",
        state_format="int8",
        release_gradients=release_gradients,
        tuning=shardopt.Tuning(bucket_bytes=30_000),
    )
    for step in range(3):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [raw(param.cpu()) for param in model.parameters()] + [
        raw(value.cpu()) for param in model.parameters() for value in opt.state[param].values()
    ]


def test_released_gradients() -> None:
    assert released("cuda", True) == released("cuda", False)
