"""Tensor-parallel meshes over NCCL: data-parallel ranks that share states, beside ranks that share a layer."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardopt
from tests.support.comparing import raw
from tests.support.composed import average, batch, blocks, loss_of, parallelized
from tests.support.ranks import Pool

pytestmark = pytest.mark.gpu


def trains(device: str, stage: int) -> tuple[list[bytes], list[float]]:
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    model = parallelized(blocks(2).to(device), mesh["tp"])
    options = {"lr": 0.01, "max_grad_norm": 0.05, "tuning": shardopt.Tuning(bucket_bytes=300)}
    optimizer = shardopt.ShardedAdamW(model.parameters(), stage=stage, process_group=group, **options)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(step, mesh["dp"].get_local_rank()).to(device))).backward()
        average(model.parameters(), group)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    local = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [raw(each.detach().cpu()) for each in local], norms


@pytest.mark.parametrize("stage", [0, 1])
def test_tensor_parallel(ranks: Pool, stage: int) -> None:
    for world in (2, 4):
        on_cpu = ranks.run(trains, "cpu", stage, world=world)
        assert ranks.run(trains, "cuda", stage, world=world, backend="nccl") == on_cpu
