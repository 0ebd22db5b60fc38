"""What an optimizer tells while it trains: to a writer, to a file, to ``print``."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import ShardedAdamW, ShardedSGD, ShardoptError, Tuning
from shardopt.__main__ import main
from shardopt.tools.top import read
from tests.support.ranks import Pool


class Writer:
    """TensorBoard's, as far as it is used."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


def train(module: nn.Module, opt: Any, factor: float = 1.0) -> None:
    opt.zero_grad()
    (factor * module(torch.ones(1, 300))).sum().backward()
    opt.step()


@pytest.mark.filterwarnings("ignore:.*Inf or NaN")
def test_a_log_has_the_numbers_of_the_optimizer() -> None:
    module, told, writer = nn.Linear(300, 7), list[dict[str, float]](), Writer()
    opt = ShardedAdamW(module, stage=2, max_grad_norm=1.0)
    train(module, opt)  # before anybody listened
    handles = opt.log(told.append, every=1), opt.log(writer, every=2)
    for factor in (1.0, math.nan, 2.0):
        train(module, opt, factor)
    assert [(each["step"], each["updates"], each["skipped"]) for each in told] == [(1, 1, 0), (2, 1, 1), (3, 2, 1)]
    assert told[2]["grad_norm"] == opt.grad_norm and opt.updates == 3 and math.isnan(told[1]["grad_norm"])
    memory = {f"memory/{kind}/{tier}": size for kind, tiers in opt.memory().items() for tier, size in tiers.items()}
    assert {name: value for name, value in told[2].items() if name.startswith("memory/")} == memory
    assert {name for name in told[2] if name.startswith("seconds/")} == {f"seconds/{each}" for each in opt.timings()}
    assert told[2]["traffic/gradients"] == 0  # one rank
    assert writer.scalars["shardopt/skipped", 2] == 1 and {step for _, step in writer.scalars} == {2}
    for handle in handles:
        handle.remove()
    train(module, opt)
    assert len(told) == 3
    opt.close()


def reports_on(folder: str) -> dict[str, float]:
    torch.manual_seed(0)
    module, told = nn.Linear(300, 7), list[dict[str, float]]()
    opt = ShardedSGD(module, stage=2, tuning=Tuning(neighbours=False))
    opt.log(told.append, every=2)
    opt.monitor(folder, every=0)
    for _ in range(4):
        train(module, opt)
    dist.barrier()
    opt.close()
    return told[1]


def test_ranks_tell_what_travels_and_top_shows_it(
    ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank of two receives the other one's half of the params, and of the gradients, in a step."""
    folder = tmp_path / "run"
    padded = 2 * 1280  # of 2,107 elements in blocks of 256, cut in two
    for told in ranks.run(reports_on, str(folder), world=2):
        assert told["traffic/params"] == 4 * padded / 2
        assert told["traffic/gradients"] == 4 * padded / 2
    found = read(folder)
    assert [(each["rank"], each["ranks"], each["facts"]["step"]) for each in found] == [(0, 2, 4), (1, 2, 4)]
    assert main(["top", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.split()[:4] == ["rank", "0", "rank", "1"] and "seconds/update" in shown and "5.0 KiB" in shown
    assert {file.name for file in folder.iterdir()} == {"rank0.json", "rank1.json"}
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    for text in (
        "[]",
        '{"rank": 1, "ranks": 2, "time": 0, "facts": {"step": "\\u001b[2J"}}',
        '{"rank": 1, "time": 0, "facts": {}}',
        '{"rank": 1, "facts": {}}',
        "[" * 10**5,
    ):
        (folder / "rank1.json").write_text(text)
        with pytest.raises(ShardoptError, match=r"opt\.monitor\(\) did not write"):
            read(folder)
    with pytest.raises(ShardoptError, match=r"call opt\.monitor"):
        read(tmp_path)
    later = {"rank": 0, "ranks": 1, "time": time.time() + 1, "facts": {}}
    (folder / "rank0.json").write_text(json.dumps(later))
    (folder / "rank1.json").write_text(json.dumps({**later, "rank": 1, "ranks": 2, "time": 0}))
    assert read(folder) == [later], "a file of an earlier training of more ranks"
    for rank, facts in enumerate(({"step": 3, "grad_norm": 0.5}, {"step": 3})):
        told_of_rank = {**later, "rank": rank, "ranks": 2, "facts": facts}
        (folder / f"rank{rank}.json").write_text(json.dumps(told_of_rank))
    assert main(["top", str(folder)]) == 0
    assert ["grad_norm", "0.5", "-"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def monitored_by_halves(folder: str) -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    module = nn.Linear(300, 7)
    opt = ShardedSGD(module, process_group=groups[dist.get_rank()])
    opt.monitor(folder)
    train(module, opt)
    file = Path(folder) / f"trace{dist.get_rank()}.json"
    opt.timings().trace(file)
    assert {each["pid"] for each in json.loads(file.read_text())["traceEvents"]} == {dist.get_rank()}
    opt.close()


def test_ranks_of_two_groups_have_two_files(ranks: Pool, tmp_path: Path) -> None:
    """Each is rank 0 of its group, and itself in its trace."""
    ranks.run(monitored_by_halves, str(tmp_path), world=2)
    assert [(each["rank"], each["ranks"]) for each in read(tmp_path)] == [(0, 2), (1, 2)]


def test_a_monitor_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may go elsewhere, the directory may go, and what lies at a file's temporary name is not followed."""
    monkeypatch.chdir(tmp_path)
    module = nn.Linear(300, 7)
    opt = ShardedSGD(module)
    opt.monitor("run", every=0)
    monkeypatch.chdir("/")
    kept, link = tmp_path / "kept", tmp_path / "run" / f"rank0.{os.getpid()}"
    kept.write_text("kept")
    link.symlink_to(kept)
    train(module, opt)
    assert kept.read_text() == "kept" and [each["facts"]["step"] for each in read(tmp_path / "run")] == [1]
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"opt\.monitor\(\) could not write to .*run"):
        train(module, opt)
    (tmp_path / "run").mkdir()
    train(module, opt)
    assert [each["facts"]["step"] for each in read(tmp_path / "run")] == [3]
    opt.close()


def test_a_file_is_not_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Machines of CI set FORCE_COLOR; the live view would never end."""
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock = SimpleNamespace(time=time.time, sleep=lambda _: pytest.fail("the live view, into a file"))
    monkeypatch.setattr("shardopt.tools.top.time", clock)  # other threads may sleep
    (tmp_path / "rank0.json").write_text('{"rank": 0, "ranks": 1, "time": 0, "facts": {"step": 1}}')
    assert main(["top", str(tmp_path)]) == 0 and "rank 0" in capsys.readouterr().out


def test_print_tells_what_differs_and_what_it_costs() -> None:
    module = nn.Linear(300, 7)
    opt = ShardedAdamW(module, stage=2, max_grad_norm=1.0, tuning=Tuning(seed=3))
    assert "(stage=2, max_grad_norm=1.0, tuning=Tuning(seed=3), not bound" in str(opt)
    train(module, opt)
    memory = opt.memory()
    nbytes = sum(tiers["device"] for tiers in memory.values())
    told = str(opt)
    assert "not bound" not in told and f"state {memory['state']['device'] / 1e3:.2f}" in told
    assert f"On this rank (device: {nbytes / 1e3:.2f} kB (param {memory['param']['device'] / 1e3:.2f}, " in told
    opt.close()
    assert "closed" in str(opt)
