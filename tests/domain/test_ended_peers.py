"""A rank whose process ends says so: whoever waits for it gets an error, and the job ends; who reads is still served.

The deadlines are longer than the tests may take, so that what ends a wait is what was said. That a rank serves while
another one saves is in tests/states/test_one_rank_alone.py.
"""

import textwrap
from pathlib import Path

import pytest

from tests.support.scripts import Program

SCRIPT = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from shardopt import ShardedAdamW, Tuning
from shardopt.remote import peers
from shardopt.units import gathered

rank, folder, waits = int(sys.argv[1]), sys.argv[2], sys.argv[3]
peers.SILENCE = peers.LINGER = 36000.0
gathered.GATHER_TIMEOUT = timedelta(hours=10)
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=10))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
if waits == "in DDP":
    model = DistributedDataParallel(model)
    opt = ShardedAdamW(model.parameters(), stage=1)
elif waits == "in a step":
    opt = ShardedAdamW(model.parameters(), stage=1)
elif waits == "in a backward":
    opt = ShardedAdamW(model, stage=2)
else:
    opt = ShardedAdamW(model, stage=3, tuning=Tuning(keep_below=0, neighbours=False))

def train():
    opt.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()

train()
if rank == 1:
    sys.exit(3)  # as hydra and click end, and the processes of torch.multiprocessing.spawn that failed
train()
"""


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ("in a step", ["CommunicationError", "rank 1, whose process has ended"]),
        ("in a backward", ["CommunicationError", "rank 1, whose process has ended", "reducing gradients"]),
        ("in a gather", ["CommunicationError", "rank 1, whose process has ended"]),
        ("in DDP", ["Connection closed by peer"]),
    ],
)
def test_who_waits_for_a_rank_that_ended_gets_an_error(waits: str, words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    first, second = (Program(str(script), (str(rank), str(tmp_path), waits)) for rank in range(2))
    ended = [second.wait(), first.wait()]
    assert [each.returncode for each in ended] == [3, 1], ended
    assert all(each in ended[1].stderr for each in words), ended[1].stderr
