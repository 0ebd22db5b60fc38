"""Promise: ``opt.program()`` says what an update does: these operations run, in this order, on all ranks alike."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shardopt
from shardopt import Tuning
from shardopt.domain.shard import Shard
from shardopt.step import program
from shardopt.step.update import Update
from tests.support.ranks import Pool

OPS = ("Run", "AddUp", "AddMargins", "Accumulate", "ToOwners", "Matrix", "Back", "Apply")
PROGRAMS = {
    "AdamW": ["Run"],
    "LAMB": ["Run 0", "AddUp 0", "Run"],
    "Adafactor": ["AddMargins", "Run 0", "AddUp 0", "Run"],
    "Muon": ["Accumulate", "ToOwners", "Run", "Matrix", "Back", "Apply"],
}


def run_and_told(kind: str, **options: Any) -> tuple[list[str], list[str]]:
    """The ops that a step ran, and those that the optimizer tells of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    opt = getattr(shardopt, f"Sharded{kind}")(model, lr=0.1, tuning=Tuning(bucket_bytes=1024), **options)
    assert opt.program() == ""
    ran: list[str] = []

    def noted(name: str) -> Any:
        run = getattr(program, name).run

        def note(op: Any, *arguments: Any) -> None:
            number = getattr(op, "number", None)
            ran.append(name if number is None else f"{name} {number}")
            run(op, *arguments)

        return patch.object(getattr(program, name), "run", note)

    for step in range(2):  # planned, replayed
        if step:
            for name in OPS:
                noted(name).start()
        model(torch.ones(2, 8) * (step + 1)).sum().backward()
        opt.step()
        opt.zero_grad()
    patch.stopall()
    told = [line.partition(":")[0] for line in opt.program().splitlines()]
    opt.close()
    return ran, told


def on_each_rank(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {kind: run_and_told(kind, stage=2) for kind in PROGRAMS}
    return found | {f"{kind} on a disk": run_and_told(kind, stage=1, offload=folder) for kind in PROGRAMS}


def test_the_program_is_what_runs(ranks: Pool, tmp_path: Any) -> None:
    """In memory and on a disk, on both ranks."""
    for found in ranks.run(on_each_rank, str(tmp_path), world=2):
        for name, (ran, told) in found.items():
            assert ran == told == PROGRAMS[name.split(" ")[0]], name


def test_the_first_bucket_to_be_updated_is_not_the_largest() -> None:
    """The wire idles until it is sent. The others follow in the order in which the next forward reads them."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    opt = shardopt.ShardedSGD(model, lr=0.1, tuning=Tuning(bucket_bytes=400))
    model(torch.zeros(1, dtype=torch.int64)).sum().backward()
    sent: list[list[torch.Size]] = []

    def send(_: Update, shard: Shard) -> None:
        sent.append([each.shape for each in shard.bucket.params])

    with patch.object(Update, "send", send):
        opt.step()
    opt.close()
    assert sent[:2] == [[(8, 8)], [(64, 8)]] and len(sent) == 3


def test_a_released_bucket_runs_the_program_by_itself() -> None:
    ran, told = run_and_told("AdamW", stage=0, release_gradients=True)
    assert told == ["Run"] and set(ran) == {"Run"}


@pytest.mark.parametrize("name", OPS)
def test_each_op_says_what_it_does(name: str) -> None:
    said = str(program.Program((object.__new__(getattr(program, name)),)))
    assert said.startswith(f"{name}: ") and said.endswith(".") and len(said) < 130, said
