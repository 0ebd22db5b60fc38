"""Two jobs that save into one directory: one of them is told, and neither takes the other's files away."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from shardopt import CheckpointError
from shardopt.checkpoint import files, publish
from shardopt.checkpoint.inspect import verify
from tests.support.checkpoints import save
from tests.support.ranks import Pool
from tests.support.training import raises

SAVES = 10  # of each of two jobs


def model(value: float = 1.0) -> nn.Module:
    module = nn.Linear(40, 30)
    nn.init.constant_(module.weight, value)
    return module


def names(root: Path) -> list[str]:
    return sorted(path.name[:6] for path in root.iterdir())


def test_a_save_beside_another_one_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    save(tmp_path, model(), None)
    target = publish.begin(tmp_path, 1)  # another job, as far as it has come
    there = sorted(os.listdir(tmp_path)), os.listdir(target.saving)
    for asynchronous in (False, True):
        with raises(
            CheckpointError, "another job saves into this directory", target.saving.name, "directory of its own"
        ):
            shardopt.save_checkpoint(tmp_path, model(), asynchronous=asynchronous)
    assert (sorted(os.listdir(tmp_path)), os.listdir(target.saving)) == there
    # Further on: its checkpoint is published, `latest` is about to be, older ones are being removed.
    files.rename(target.saving, target.published)
    pointer, removing = tmp_path / f"latest-{target.token}", tmp_path / f"removing-{'0' * 16}"
    pointer.write_text("x")
    removing.mkdir()
    (removing / f"owner-{'0' * 16}").touch()
    with raises(CheckpointError, "another job saves into this directory", target.published.name):
        save(tmp_path, model(), None)
    assert pointer.exists() and len(os.listdir(removing)) == 1
    # It has ended, in whatever way: what it left is collected.
    target.release()
    save(tmp_path, model(), None)
    assert names(tmp_path) == ["000001", "000002", "000003", "latest"]


def test_what_a_crash_left_is_not_another_job(tmp_path: Path) -> None:
    target = publish.begin(tmp_path, 1)
    assert target.lock is not None
    files.close(target.lock)  # as a process that ends
    (tmp_path / f"saving-{'1' * 16}").mkdir()  # ended before its owner was there
    (tmp_path / publish.LOCK).touch()
    save(tmp_path, model(), None)
    assert names(tmp_path) == ["000001", "latest"]


def test_processes_that_were_forked_meanwhile_hold_no_lock(tmp_path: Path) -> None:
    """Workers of a DataLoader, say, that outlive the save."""
    target = publish.begin(tmp_path, 1)
    assert target.lock is not None
    theirs = os.dup(target.lock)  # one lock with two files, as after a fork
    target.release()
    assert not files.is_held(target.owner)
    os.close(theirs)
    save(tmp_path, model(), None)
    assert names(tmp_path) == ["000001", "latest"]


def test_a_directory_whose_lock_never_comes_free_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LONGEST_BEGINNING", 0.05)
    held = files.lock(tmp_path / publish.LOCK)
    assert held is not None
    with raises(CheckpointError, "another job saves into this directory"):
        save(tmp_path, model(), None)
    files.unlock(tmp_path / publish.LOCK, held)
    save(tmp_path, model(), None)
    assert names(tmp_path) == ["000001", "latest"]


def test_a_checkpoint_that_is_published_meanwhile_is_another_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is renamed between the moment another job lists it and the moment that job looks inside."""
    target = publish.begin(tmp_path, 1)
    is_file = files.is_file

    def renamed_first(path: Path) -> bool:
        if target.saving.exists():
            target.saving.rename(target.published)
            (tmp_path / f"latest-{target.token}").touch()
        return is_file(path)

    monkeypatch.setattr(files, "is_file", renamed_first)
    with raises(CheckpointError, "another job saves into this directory"):
        publish.begin(tmp_path, 2)
    assert target.published.exists() and (tmp_path / f"latest-{target.token}").exists()
    target.release()


def two_jobs(root: Path) -> None:
    """Each saves as often as it can: every save is published whole, or refused in these words."""
    published, refused = 0, 0
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    module = model(1.0 + dist.get_rank())
    optimizer = shardopt.ShardedSGD(module, lr=0.1, process_group=alone)
    optimizer.bind()
    dist.barrier()
    for number in range(SAVES):
        try:
            path = shardopt.save_checkpoint(root, module, optimizer, step=number, keep=3).wait()
        except CheckpointError as error:
            assert "another job saves into this directory" in str(error), error
            refused += 1
        else:
            published += 1
            assert path.parent == root
    told: list[Any] = [None, None]
    dist.all_gather_object(told, (published, refused))
    assert sum(count for count, _ in told) and all(sum(each) == SAVES for each in told), told
    if dist.get_rank() == 0:
        left = publish.published(root)
        assert left and all(verify(path) == [] for path in left), told
        save(root, module, optimizer)
        assert not [path for path in root.iterdir() if path.name.startswith(("saving", "removing", "latest-"))]
        with torch.no_grad():
            module.weight.zero_()
        assert shardopt.load_checkpoint(root, module, optimizer).step == 0
        assert torch.equal(module.weight, torch.ones_like(module.weight))
    dist.barrier()


def test_two_jobs_in_one_directory_leave_whole_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(two_jobs, tmp_path, world=2, timeout=60)
