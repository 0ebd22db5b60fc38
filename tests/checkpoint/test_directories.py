"""The directory of a training's checkpoints: how many stay, which is the newest, links to a larger disk."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardopt
from shardopt.__main__ import main
from shardopt.checkpoint.publish import published


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 7])
def test_as_many_checkpoints_stay_as_are_to_be_kept(keep: int, tmp_path: Path) -> None:
    module, saved = nn.Linear(2, 2), []
    for _ in range(6):
        saved.append(shardopt.save_checkpoint(tmp_path, module, keep=keep).path)
        assert published(tmp_path) == saved[-keep:]


def test_the_directory_is_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where runs lie on a larger disk: the link itself, a new directory below it, and a link to one checkpoint."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for directory in (tmp_path / "link", tmp_path / "link" / "below" / "runs"):
        module, other = nn.Linear(2, 2), nn.Linear(2, 2)
        for _ in range(2):
            path = shardopt.save_checkpoint(directory, module, keep=1).path
        assert published(directory) == [path] and path.parent == directory
        shardopt.load_checkpoint(directory, other)
        assert torch.equal(module.weight, other.weight)
        best = tmp_path / f"best of {directory.name}"
        best.symlink_to(path)
        shardopt.load_checkpoint(best, nn.Linear(2, 2))
        for command in (["inspect"], ["verify"], ["verify", "--all"], ["export", "--to", "safetensors"]):
            out = [str(tmp_path / f"weights of {directory.name}")] if "export" in command else []
            assert main([*command, str(directory), *out]) == 0, capsys.readouterr().err


def test_the_newest_is_loaded_where_nothing_says_which_is_the_latest(tmp_path: Path) -> None:
    """A process ended before it wrote ``latest``. A checkpoint holds the ranks' files, its owner's and a manifest."""
    module = nn.Linear(2, 2)
    for step in (7, 5):
        path = shardopt.save_checkpoint(tmp_path, module, step=step).path
        names = sorted(each.name for each in path.iterdir())
        assert names == ["manifest.json", f"owner-{path.name[-16:]}", "rank-00000.safetensors"]
    (tmp_path / "latest").unlink()
    assert shardopt.load_checkpoint(tmp_path, module).step == 5
