"""In a group that carries no host memory, as NCCL's, what ranks tell each other goes by the params' own GPU.

There is no GPU here: the group says that it is such a one, and what is meant for a GPU stays and is noted.
"""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from shardopt import ShardedSGD, Tuning
from shardopt.partition.comm.group import Ranks
from tests.support.ranks import Pool


class Noted(TorchFunctionMode):
    """Takes tensors that are meant for a GPU to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[torch.device] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        for given in (*args, *keywords.values()):
            if isinstance(given, torch.device) and given.type == "cuda":
                self.devices.append(given)
        args = [torch.device("cpu") if isinstance(each, torch.device) else each for each in args]
        return function(*args, **{**keywords, **({"device": "cpu"} if "device" in keywords else {})})


def tells() -> dict[str, list[str]]:
    rank, cpu = dist.get_rank(), torch.device("cpu")
    ranks = Ranks(None, None, torch.device("cuda", 4 + rank))
    vector, shared = torch.ones(3), [torch.full((2,), float(rank))]
    calls: dict[str, Any] = {
        "exchange": lambda: ranks.exchange([rank], cpu, "a test"),
        "exchange_json": lambda: ranks.exchange_json({"rank": rank}, cpu, "a test"),
        "add_up": lambda: ranks.add_up(vector, "a test"),
        "broadcast": lambda: ranks.broadcast(shared, "a test", root=1),
        "collect": lambda: ranks.collect(torch.full((2,), rank), 0, "a test"),
    }
    found = {}
    for name, call in calls.items():
        with (
            patch.object(Ranks, "_backend", lambda _, device: None if device.type == "cpu" else "nccl"),
            Noted() as noted,
        ):
            told = call()
        found[name] = [str(each) for each in set(noted.devices)]
        if name == "exchange":
            assert told == [[0], [1]]
    assert vector.tolist() == [2.0] * 3 and shared[0].tolist() == [1.0, 1.0]
    return found


def test_host_values_travel_on_the_params_device(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(tells, world=2)):
        assert len(found) == 5 and all(devices == [f"cuda:{4 + rank}"] for devices in found.values()), found


def are_told_of_the_device() -> list[str]:
    made: list[Any] = []

    class Watched(Ranks):
        def __init__(self, group: Any, deadline: Any, device: Any = None):
            super().__init__(group, deadline, device)
            made.append(self.device)

    with (
        patch("shardopt.engine.Ranks", Watched),
        patch("shardopt.partition.mesh.Ranks", Watched),
        patch("shardopt.domain.domains.Ranks", Watched),
    ):
        for options in (
            {"stage": 3},
            {"stage": 2, "process_group": init_device_mesh("cpu", (1, 2))},
            {"stage": 0, "process_group": init_device_mesh("cpu", (2, 1))},
            {"stage": 1, "process_group": init_device_mesh("cpu", (2,))},
            {"norm_group": dist.group.WORLD},
        ):
            model = nn.Linear(8, 8)
            given = model if "stage" in options else model.parameters()
            optimizer = ShardedSGD(given, lr=0.1, tuning=Tuning(keep_below=1), **options)
            model(torch.ones(1, 8)).sum().backward()
            if "stage" not in options:
                for param in model.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.close()
    return [str(each) for each in made]


def test_all_groups_of_an_optimizer_know_its_params_device(ranks: Pool) -> None:
    for made in ranks.run(are_told_of_the_device, world=2):
        assert len(made) >= 6 and set(made) == {"cpu"}, made
