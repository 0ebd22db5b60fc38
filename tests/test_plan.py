"""The planner against what optimizers hold and move; the doctor; the command line of both."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import ShardedAdamW, ShardedSGD, Tuning
from shardopt.__main__ import main
from shardopt.config import Options
from shardopt.doctor import report
from shardopt.plan import WAYS, Need, Way, cheapest, plan, transformer
from shardopt.plan_report import parse_size, table

TUNING = Tuning(bucket_bytes=8_000, keep_below=2000, live_bytes=30_000)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256))]
    return nn.Sequential(*layers, nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 7))


def held(model: nn.Module, opt: Any) -> dict[str, int]:
    model(torch.ones(2, 256, dtype=next(model.parameters()).dtype)).sum().backward()
    opt.step()
    return {kind: tiers["device"] for kind, tiers in opt.memory().items()}


def plans_are_what_is_held(kind: Any, keywords: dict[str, Any]) -> None:
    world = dist.get_world_size()
    for way in WAYS:
        model = network().to(way.dtype)
        wrapped = model if way.has_module else DistributedDataParallel(model)
        module = model if way.has_module else None
        opt = kind(model.parameters(), **keywords, stage=way.stage, module=module, tuning=TUNING)
        found = held(wrapped, opt)
        with torch.device("meta"):
            shapes = network()
        need = plan(shapes, kind([torch.zeros(1)], **keywords), world, way, Options(tuning=TUNING))
        for each in ("param", "gradient", "master", "state"):
            assert need.bytes[each] == found[each], f"{way}, {each}"
        assert found["buffer"] <= need.bytes["buffer"], f"{way}: {found['buffer']}"
        at_rest = need.total - need.bytes["window"] - need.bytes["ddp"]
        assert sum(found.values()) == pytest.approx(at_rest, rel=0.02), str(way)
        numel = sum(param.numel() for param in model.parameters())
        whole, _, parts = need.formula.rpartition(" + ") if "/N" in need.formula else (need.formula, "", "0/N")
        formula = float(whole or 0) + float(parts.removesuffix("/N")) / world
        padded = need.total - need.bytes["window"] - need.bytes["buffer"]
        # A world of one has no DDP.
        a_param = formula - (way.dtype.itemsize if world == 1 and not way.has_module else 0)
        assert padded / numel == pytest.approx(a_param, rel=0.03), f"{way}: {need.formula}"
        opt.close()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_plans_are_what_is_held(world: int, ranks: Pool) -> None:
    ranks.run(plans_are_what_is_held, ShardedAdamW, {}, world=world)
    if world == 2:
        ranks.run(plans_are_what_is_held, ShardedSGD, {"momentum": 0.9}, world=world)


def need_of(stage: int, ranks: int, numel: int = 10_000_000, dtype: torch.dtype = torch.bfloat16) -> Need:
    return plan(transformer(numel), ShardedAdamW([torch.zeros(1)]), ranks, Way(stage, True, dtype))


def test_formulas_and_traffic() -> None:
    low = [need_of(stage, 8).formula for stage in (0, 1, 2, 3)]
    assert low == ["18", "2 + 16/N", "2 + 16/N", "18/N"]
    full = [need_of(stage, 8, dtype=torch.float32).formula for stage in (0, 1, 2, 3)]
    assert full == ["16", "4 + 12/N", "4 + 12/N", "16/N"]
    unit = 2 * 10_000_000 * 7 // 8
    assert [need_of(stage, 8).moved for stage in (1, 2, 3)] == [2 * unit, 2 * unit, 3 * unit]
    assert need_of(0, 1).moved == 0


def test_the_cheapest_that_fits() -> None:
    needs = [need_of(stage, 8, 10**9) for stage in (0, 1, 2, 3)]
    assert cheapest(needs, 10**12).way.stage == 1
    assert cheapest(needs, needs[2].total - 1).way.stage == 3
    assert cheapest(needs, 1000) is None


def test_sizes() -> None:
    for numel in (1, 300, 10_001, 10_000_000, 7_000_000_000):
        assert sum(param.numel() for param in transformer(numel).parameters()) == numel
    read = {"80G": 80 * 10**9, "80GiB": 80 * 2**30, "7e9": 7 * 10**9, "1.5k": 1500, "2Mi": 2**21, "12": 12, "3B": 3}
    assert {text: parse_size(text) for text in read} == read
    for text in ("", "G", "1X"):
        with pytest.raises(ValueError):
            parse_size(text)
    text = table([need_of(3, 8)], 10_000_000, 10**9)
    assert "18/N" in text and text.splitlines()[0].split()[:3] == ["way", "param", "gradient"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "chart.png"
    arguments = ["plan", "--params", "7e9", "--ranks", "8", "--device-memory", "80G", "--plot", str(chart)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "cheapest that fits: stage 1, bfloat16" in printed and "4 + 12/N" in printed
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--params", "7e9", "--device-memory", "8G", "--dtype", "bf16", "--optimizer", "SGD"]) == 1
    assert "none fits" in capsys.readouterr().out


def test_doctor(tmp_path: Path) -> None:
    text = report(tmp_path)
    for word in ("python", "torch", "backends", "pinned memory", "direct I/O", shardopt.__version__):
        assert word in text
    assert "refused" in report(tmp_path / "missing")
    done = subprocess.run([sys.executable, "-m", "shardopt", "doctor"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "gloo" in done.stdout, done.stderr
