"""Device meshes and process groups: whose params are whose, and which ranks average, whichever way ranks are named."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import BindingError, DisagreementError, ShardoptError, Tuning
from tests.support.allocations import MESSAGE, failing
from tests.support.ranks import Pool
from tests.support.training import raises, raw


def groups_of_one_mesh() -> None:
    """``mesh["copies"]`` is a new object at each call: groups that name the same ranks are updated all the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    params = [nn.Parameter(torch.ones(300)) for _ in range(3)]
    groups: list[dict[str, Any]] = [{"params": params[:1]}]
    groups += [{"params": [param], "process_group": mesh["copies"]} for param in params[1:]]
    assert groups[1]["process_group"] is not groups[2]["process_group"]
    optimizer = shardopt.ShardedSGD(groups, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(bool((param == 0.5).all()) for param in params), [float(param[0]) for param in params]
    assert repr(optimizer).count("ranks=2") == 1  # one domain for both
    others, copied = copy.deepcopy((params, optimizer))  # the ranks are those of the original
    kept = [group.get("process_group") for group in optimizer.param_groups]
    found = [group.get("process_group") for group in copied.param_groups]
    assert all(one is other for one, other in zip(found, kept, strict=True)) and kept[1] is not None
    for param in others:
        param.grad = torch.ones_like(param)
    copied.step()
    assert all(bool((param == 0.0).all()) for param in others) and all(bool((param == 0.5).all()) for param in params)
    assert (copied.updates, optimizer.updates) == (2, 1)


def ranks_of_ddp() -> None:
    """Gradients must be averaged over DDP's ranks, whether others are named by a group or by a mesh."""
    everyone = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    for named in (everyone["a"], everyone["a"].get_group()):
        model = DistributedDataParallel(nn.Linear(3, 2))
        optimizer = shardopt.ShardedSGD(model, lr=0.5, process_group=named, stage=2)
        with raises(BindingError, f"process_group= holds ranks [{dist.get_rank()}]", "module [0, 1]"):
            model(torch.ones(1, 3))
        optimizer.close()
        # The same where DDP comes later.
        module = nn.Linear(3, 2)
        optimizer = shardopt.ShardedSGD(module, lr=0.5, process_group=named, stage=2)
        optimizer.bind()
        model = DistributedDataParallel(module)
        with raises(BindingError, f"process_group= holds ranks [{dist.get_rank()}]", "module [0, 1]"):
            model(torch.ones(1, 3))
        optimizer.close()
    for same in (everyone["b"], everyone):
        model = DistributedDataParallel(nn.Linear(3, 2))
        optimizer = shardopt.ShardedSGD(model, lr=0.5, process_group=same, stage=2)
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        optimizer.step()
        optimizer.close()


def noise_of_slices() -> None:
    """Ranks of a tensor mesh draw noise of their own for slices, and the same for copies, at any data parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = torch.linspace(-1, 1, 600).repeat(2).bfloat16()  # both slices hold the same
    placed = {"sliced": [Shard(0)], "copied": [Replicate()]}
    params = {name: nn.Parameter(distribute_tensor(own, mesh["tp"], where)) for name, where in placed.items()}
    options: dict[str, Any] = {"lr": 2**-12 / 3, "process_group": mesh["dp"]}
    optimizer = shardopt.ShardedAdamW(params.values(), master="none", **options)
    single = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    alone = nn.Parameter(own[:600].clone())  # the first slice, as a plain param of one rank
    reference = shardopt.ShardedAdamW([alone], **{**options, "process_group": single}, master="none")
    for _ in range(3):
        for param in params.values():
            param.grad = distribute_tensor(own.sin(), mesh["tp"], param.placements)
        alone.grad = own[:600].sin()
        optimizer.step()
        reference.step()
    locals_of: dict[str, list[Any]] = {
        name: [torch.empty_like(param._local_tensor) for _ in range(4)] for name, param in params.items()
    }
    for name, param in params.items():
        dist.all_gather(locals_of[name], param._local_tensor.detach())
    sliced, copied = locals_of["sliced"], locals_of["copied"]
    assert sliced[0].equal(sliced[2]) and sliced[1].equal(sliced[3])  # data-parallel ranks
    assert not sliced[0].equal(sliced[1])  # tensor-parallel ranks
    assert all(each.equal(copied[0]) for each in copied)
    assert sliced[0].equal(alone)  # the first slice draws what one rank alone draws


def memory_runs_out_for_sums() -> None:
    """On one rank, while gradients that are sums are made whole: its mates hear of it, and nothing changed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor, rank = mesh["tp"], dist.get_rank()
    params = [nn.Parameter(distribute_tensor(torch.ones(600), tensor, [Replicate()])) for _ in range(3)]
    optimizer = shardopt.ShardedSGD(params, lr=0.5, process_group=mesh["dp"], tuning=Tuning(timeout=60))

    def backward() -> None:
        for param in params:
            part = torch.full((600,), float(tensor.get_local_rank()))
            param.grad = DTensor.from_local(part, tensor, [Partial()], run_check=False)

    backward()
    optimizer.step()
    backward()
    with failing(None, least=2000) as meter:
        optimizer.step()
    found = [0] * 2
    for at in range(1, min(meter.count, 5) + 1):
        backward()
        before = [raw(param._local_tensor) for param in params]
        with failing(at if rank == 1 else None, least=2000) as meter:
            try:
                optimizer.step()
            except MemoryError:
                assert rank == 1
                found[0] += 1
            except DisagreementError as error:
                assert rank != 1 and MESSAGE in str(error)
                found[1] += 1
        assert before == [raw(param._local_tensor) for param in params]
    assert sum(found) >= 3  # once for each sum
    backward()
    optimizer.step()
    assert bool((params[0]._local_tensor == params[2]._local_tensor).all())
    params[0].grad = distribute_tensor(torch.ones(600), mesh["dp"], [Replicate()])
    with raises(ShardoptError, "the gradient of a DTensor param", "of mesh"):
        optimizer.step()


def refused_at_first_sight() -> None:
    """What one rank alone is refused for before its first step is told to its mates, in both directions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor, rank = mesh["tp"], dist.get_rank()
    made = DTensor.from_local(torch.ones(600), tensor, [Partial() if rank == 1 else Replicate()], run_check=False)
    param = nn.Parameter(made)
    param.grad = torch.zeros_like(param)
    optimizer = shardopt.ShardedSGD([param], lr=0.5, process_group=mesh["dp"], tuning=Tuning(timeout=60))
    with raises(BindingError if rank == 1 else DisagreementError, "parts of a sum"):
        optimizer.step()


def refused_at_construction() -> None:
    """Which of three dimensions share the states is not known; a pipeline cannot skip what was updated in backward."""
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    params = [nn.Parameter(torch.ones(3))]
    for given, where in (
        ({"params": params, "process_group": mesh}, "process_group has 3 dimensions"),
        ({"params": [{"params": params, "process_group": mesh}]}, "process_group of a param group has 3 dimensions"),
    ):
        with raises(ValueError, "slice the DeviceMesh to two dimensions", where):
            shardopt.ShardedSGD(**given, lr=0.5)
    with raises(ValueError, "omit release_gradients", "with norm_group"):
        shardopt.ShardedSGD(nn.Linear(3, 2), lr=0.5, release_gradients=True, norm_group=dist.group.WORLD)
    optimizer = shardopt.ShardedSGD(params, lr=0.5, process_group=mesh["a", "b"])
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert params[0].tolist() == [0.5, 0.5, 0.5]


def clipped_apart() -> None:
    """Two stages of a pipeline: what decides on the whole model is the same on all of its ranks, or no rank steps."""
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    for name, given in (
        ("max_grad_norm", {"max_grad_norm": 1.0 + rank}),
        ("nonfinite", {"tuning": Tuning(nonfinite=("skip", "propagate")[rank])}),
    ):
        param = nn.Parameter(torch.ones(3))
        common = {"lr": 0.5, "process_group": alone, "norm_group": dist.group.WORLD}
        optimizer = shardopt.ShardedSGD([param], **common, **given)  # type: ignore[arg-type]
        param.grad = torch.ones(3)
        with raises(DisagreementError, f"ranks differ in {name}"):
            optimizer.step()
        assert param.tolist() == [1.0, 1.0, 1.0] and optimizer.updates == 0


def test_stages_of_a_pipeline_clip_and_skip_alike(ranks: Pool) -> None:
    ranks.run(clipped_apart, world=2)


class Copied(nn.Module):
    """A weight that is cut over a tensor mesh, and a gain of which all of its ranks have copies."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return 2 * self.weight.to_local().sum() + 3 * self.gain.sum()


def copies_in_the_norm() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    for given in ({"release_gradients": True}, {"max_grad_norm": 1e9}):
        model = Copied(mesh["tensor"])
        optimizer = shardopt.ShardedSGD(model, lr=0.5, process_group=mesh["data"].get_group(), **given)  # type: ignore[arg-type]
        model().backward()
        optimizer.step()
        assert optimizer.grad_norm == (12 * 2**2 + 3 * 3**2) ** 0.5, given
        assert bool((model.weight.to_local() == 0.0).all()) and bool((model.gain == -0.5).all())
        optimizer.close()


def test_the_norm_counts_copies_once(ranks: Pool) -> None:
    """Where gradients are released as well."""
    ranks.run(copies_in_the_norm, world=2)


def test_groups_that_say_too_much_are_refused(ranks: Pool) -> None:
    ranks.run(refused_at_construction, world=1)


def test_mates_hear_of_what_is_refused(ranks: Pool) -> None:
    ranks.run(refused_at_first_sight, world=4)


def test_memory_runs_out_while_gradients_are_made_whole(ranks: Pool) -> None:
    ranks.run(memory_runs_out_for_sums, world=4)


def test_noise_of_tensor_parallel_ranks(ranks: Pool) -> None:
    ranks.run(noise_of_slices, world=4)


def test_groups_that_name_the_same_ranks(ranks: Pool) -> None:
    ranks.run(groups_of_one_mesh, world=4)


def test_the_ranks_are_those_of_ddp(ranks: Pool) -> None:
    ranks.run(ranks_of_ddp, world=2)
