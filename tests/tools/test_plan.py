"""The planner against what optimizers hold; the doctor; the command line of both."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import (
    Offload,
    ShardedAdafactor,
    ShardedAdagrad,
    ShardedAdamW,
    ShardedLAMB,
    ShardedMuon,
    ShardedSGD,
    Tuning,
)
from shardopt.__main__ import main
from shardopt.config import Options
from shardopt.tools.decoder import transformer
from shardopt.tools.doctor import facts_of, report
from shardopt.tools.need import Need, cheapest
from shardopt.tools.plan import plan
from shardopt.tools.plan_report import as_data, found, in_words, table
from shardopt.tools.values import parse_count, parse_size
from shardopt.tools.ways import TIERS, WAYS, Way, every_way
from tests.support.ranks import Pool
from tests.support.scripts import run_module

TUNING = Tuning(bucket_bytes=8_000, keep_below=2000, live_bytes=30_000, chunk_bytes=1 << 15)
ADAMW = ShardedAdamW([torch.zeros(1)])


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256))]
    return nn.Sequential(*layers, nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 7))


Bytes = dict[str, dict[str, int]]


def held(model: nn.Module, opt: Any) -> Bytes:
    offload = opt.options.offload_options
    for _ in range(3 if offload is not None and offload.early_bytes else 1):  # the first one updates nothing early
        model(torch.ones(2, 256, dtype=next(model.parameters()).dtype)).sum().backward()
        opt.step()
    return {kind: {tier: nbytes for tier, nbytes in tiers.items() if nbytes} for kind, tiers in opt.memory().items()}


def formula_of(need: Need, ranks: int) -> float:
    """Bytes a param that its words come to."""
    terms = need.formula.replace(", host", " +").replace(", disk", " +").split(" + ")
    return sum(float(term.removesuffix("/N")) / (ranks if term.endswith("/N") else 1) for term in terms)


def offload_of(way: Way, directory: str) -> Offload | str | None:
    where = {"device": None, "host": "cpu", "disk": directory}[way.tier]
    if where is None or not (way.sums_rest or way.fraction < 1 or way.early_bytes):
        return where
    sums = "cpu" if way.sums_rest else None
    return Offload(where, gradients=sums, fraction=way.fraction, early_bytes=way.early_bytes)


def plans_are_what_is_held(kind: Any, keywords: dict[str, Any], ways: Sequence[Way], directory: str) -> None:
    world = dist.get_world_size()
    with torch.device("meta"):
        shapes = network()
    numel = sum(param.numel() for param in shapes.parameters())
    for way in ways:
        model = network().to(way.dtype)
        wrapped = model if way.has_module else DistributedDataParallel(model)
        opt = kind(
            model.parameters(),
            **keywords,
            stage=way.stage,
            module=model if way.has_module else None,
            master=way.master,
            state_format=way.state_format,
            gradient_format=way.gradient_format,
            ema=way.ema,
            release_gradients=way.release_gradients,
            compute_dtype=way.compute_dtype,
            offload=offload_of(way, directory),
            tuning=TUNING,
        )
        found = held(wrapped, opt)
        need = plan(shapes, kind([torch.zeros(1, 1)], **keywords), world, way, Options(tuning=TUNING))
        for each in ("param", "gradient", "master", "state"):
            wanted = {tier: nbytes for tier, nbytes in need.bytes[each].items() if nbytes}
            assert wanted == found[each], f"{way}, {each}"
        for tier in TIERS:
            assert found["buffer"].get(tier, 0) <= need.bytes["buffer"].get(tier, 0), f"{way}: {found['buffer']}"
        at_rest = sum(map(need.on, TIERS)) - sum(
            need.bytes[each].get("device", 0) for each in ("arriving", "window", "ddp")
        )
        if way.has_module:
            buckets = opt.engine.takeover.rounds.main._buckets.values()  # type: ignore[union-attr]
            resting = max(sum(entry.param.numel() for entry in bucket._resting) for bucket in buckets)
            assert need.bytes["arriving"]["device"] == resting * way.dtype.itemsize, str(way)
        if way.sums_rest:  # on CPUs they are made where they rest, and in no slot
            at_rest -= need.bytes["buffer"]["device"]
            still = dataclasses.replace(way, sums_rest=False)
            at_rest += plan(shapes, kind([torch.zeros(1, 1)], **keywords), world, still, Options(tuning=TUNING)).bytes[
                "buffer"
            ]["device"]
        assert sum(sum(tiers.values()) for tiers in found.values()) == pytest.approx(at_rest, rel=0.02), (
            f"{way}: {found}"
        )
        kept = sum(map(need.on, TIERS)) - sum(
            sum(need.bytes[each].values()) for each in ("arriving", "window", "buffer")
        )
        # A world of one has no DDP.
        a_param = formula_of(need, world) - (way.dtype.itemsize if world == 1 and not way.has_module else 0)
        # Shards are whole blocks, and small params keep fp32 states.
        assert kept / numel == pytest.approx(a_param, rel=0.03 if way.state_format == "fp32" else 0.08), str(way)
        opt.close()


RELEASED = ((0, "device"), (1, "device"), (1, "host"), (2, "device"), (3, "device"))


def ways_with_formats() -> list[Way]:
    """Every stage, master, format and tier, not every combination of them: each is compiled for."""
    low = [way for way in WAYS if way.dtype is torch.bfloat16]
    kinds = [("split", "int8", "host"), ("split24", "bf16", "disk"), ("none", "int8", "device")]
    found = [
        dataclasses.replace(way, master=master, state_format=states, tier=tier, ema=0.999 if states == "bf16" else None)
        for way, (master, states, tier) in zip(low, itertools.cycle(kinds), strict=False)
    ]
    found += [dataclasses.replace(way, gradient_format="bf16") for way in found if way.has_module]
    mixed = [Way(3, True, torch.bfloat16, state_format="int8", tier="disk", fraction=0.4)]
    mixed += [Way(2, True, torch.bfloat16, tier="host", fraction=0.5)] * 2  # on 2 ranks and on 4
    mixed += [Way(2, True, torch.bfloat16, tier="host", early_bytes=60_000)] * 2
    mixed += [dataclasses.replace(way, sums_rest=True) for way in found if way.stage >= 2 and way.tier != "device"]
    released = [
        Way(stage, True, torch.bfloat16, "split24", "int8", tier, release_gradients=True) for stage, tier in RELEASED
    ]
    return [
        *found,
        *mixed,
        Way(2, True, torch.float32, tier="disk"),
        Way(2, True, torch.bfloat16, "split24"),
        *(Way(stage, True, torch.float32, compute_dtype=torch.bfloat16) for stage in (1, 2, 3, 3)),
        Way(3, True, torch.float32, state_format="int8", tier="host", compute_dtype=torch.bfloat16),
        *released,
    ]


WORLDS = (1, 2, 4)
# For rules that look at whole params, and release no gradients, whatever is asked for.
WHOLE = (Way(2, True, torch.float32), Way(3, True, torch.bfloat16, tier="host"))


def by_turns(ways: Sequence[Way], world: int) -> Sequence[Way]:
    """Every way on 2 ranks or on 4, a third of them on one."""
    return {1: ways[::3], 2: ways[1::2], 4: ways[::2]}[world]


def of_formats(ways: Sequence[Way], world: int, ranks: Pool, directory: str) -> None:
    ranks.run(plans_are_what_is_held, ShardedAdamW, {}, ways, directory, world=world)


def of_adagrad(ways: Sequence[Way], world: int, ranks: Pool, directory: str) -> None:
    """Its sums stay in fp32."""
    adagrad = [way for way in ways if way.has_module and way.stage == 2]
    ranks.run(plans_are_what_is_held, ShardedAdagrad, {}, adagrad, directory, world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_plans_are_what_is_held(world: int, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(plans_are_what_is_held, ShardedAdamW, {}, by_turns(WAYS, world), str(tmp_path), world=world)
    if world == 2:
        ranks.run(plans_are_what_is_held, ShardedSGD, {"momentum": 0.9}, WAYS[::2], str(tmp_path), world=world)
        ranks.run(plans_are_what_is_held, ShardedMuon, {}, WHOLE, str(tmp_path), world=world)
        ranks.run(plans_are_what_is_held, ShardedLAMB, {}, WHOLE[:1], str(tmp_path), world=world)
        ranks.run(plans_are_what_is_held, ShardedAdafactor, {}, WHOLE[:1], str(tmp_path), world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_plans_of_formats_and_tiers(world: int, ranks: Pool, tmp_path: Path) -> None:
    of_formats(by_turns(ways_with_formats(), world), world, ranks, str(tmp_path))
    if world == 2:
        of_adagrad(by_turns(ways_with_formats(), world), world, ranks, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_all_plans_are_what_is_held(world: int, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(plans_are_what_is_held, ShardedAdamW, {}, WAYS, str(tmp_path), world=world)
    ranks.run(plans_are_what_is_held, ShardedSGD, {"momentum": 0.9}, WAYS, str(tmp_path), world=world)
    of_formats(ways_with_formats(), world, ranks, str(tmp_path))
    of_adagrad(ways_with_formats(), world, ranks, str(tmp_path))


def need_of(stage: int, ranks: int, numel: int = 10_000_000, dtype: torch.dtype = torch.bfloat16) -> Need:
    return plan(transformer(numel), ADAMW, ranks, Way(stage, True, dtype))


def test_formulas() -> None:
    low = [need_of(stage, 8).formula for stage in (0, 1, 2, 3)]
    assert low == ["18", "2 + 16/N", "2 + 16/N", "18/N"]
    full = [need_of(stage, 8, dtype=torch.float32).formula for stage in (0, 1, 2, 3)]
    assert full == ["16", "4 + 12/N", "4 + 12/N", "16/N"]
    assert need_of(0, 1).moved == {"wire": 0, "bus": 0, "disk": 0}


def test_rules_that_look_at_whole_params() -> None:
    """Muon's momentum is of matrices alone, whose slices travel in bf16 to their owners and back if each is cut."""
    model, ranks, way = transformer(10**7), 8, Way(1, True, torch.bfloat16, release_gradients=True)
    muon = ShardedMuon([torch.zeros(1, 1)], adamw={"amsgrad": True})
    shaped = {name: param.shape for name, param in model.named_parameters() if param.ndim == 2}
    hidden = [shape for name, shape in shaped.items() if "rows" not in name]  # all but the embedding
    matrices = sum(shape.numel() for shape in hidden)
    alone = Options(tuning=Tuning(bucket_bytes=1))  # each matrix has a bucket
    need, plain = (
        plan(model, each, ranks, dataclasses.replace(way, release_gradients=False), alone) for each in (muon, ADAMW)
    )
    states = 4 * matrices + 12 * (10**7 - matrices)
    assert sum(need.bytes["state"].values()) == pytest.approx(states / ranks, rel=0.01)
    assert need.formula == f"2 + {round(8 + states / 1e7, 2):g}/N"
    assert need.moved["wire"] - plain.moved["wire"] == 4 * matrices * (ranks - 1) // ranks**2
    for optimizer in (muon, ShardedLAMB([torch.zeros(1)])):
        assert not plan(model, optimizer, ranks, way).way.release_gradients
    factored = plan(model, ShardedAdafactor([torch.zeros(1)]), ranks, dataclasses.replace(way, release_gradients=False))
    vectors = 4 * (10**7 - sum(shape.numel() for shape in shaped.values()))
    means = 4 * sum(sum(shape) for shape in shaped.values())
    assert sum(factored.bytes["state"].values()) == pytest.approx(means + vectors / ranks, rel=0.05)
    assert plan(model, ADAMW, ranks, way).way.release_gradients
    count = len(hidden)
    assert (need.matrices.matrices, need.matrices.whole, need.matrices.sliced) == (count, 0, matrices)
    packed, plain = (plan(model, each, 2, Way(1, True, torch.bfloat16)) for each in (muon, ADAMW))
    assert (packed.matrices.whole, packed.matrices.sliced, packed.matrices.padding) == (count, 0, 0)
    assert packed.moved["wire"] == plain.moved["wire"]
    shown = table([packed, plain], 10**7, None).split("\n")
    assert "whole matrices" in shown[0] and f"{count} of {count} (padding 0.0%)" in shown[1]
    assert as_data(packed, "Muon", None)["matrices"]["whole"] == count
    whole = plan(model, muon, ranks, Way(0, True, torch.bfloat16)).moved["wire"]
    assert whole == plan(model, ADAMW, ranks, Way(0, True, torch.bfloat16)).moved["wire"]


def test_formulas_and_traffic_of_tiers() -> None:
    def of(**changes: Any) -> Need:
        return plan(transformer(10**7), ADAMW, 8, dataclasses.replace(Way(2, True, torch.bfloat16), **changes))

    cast = [of(dtype=torch.float32, compute_dtype=torch.bfloat16, stage=stage) for stage in (1, 2, 3)]
    assert [each.formula for each in cast] == ["2 + 16/N", "2 + 16/N", "16/N"]
    assert cast[2].moved == of(stage=3).moved  # units and gradients travel in bf16
    assert cast[2].bytes["window"] == of(stage=3).bytes["window"]
    split = [of(master=master).formula for master in ("split", "split24", "none")]
    assert split == ["2 + 14/N", "2 + 13/N", "2 + 12/N"]
    assert of(master="split24", state_format="int8").formula == "2 + 7.03/N"
    assert of(master="none", state_format="bf16", ema=0.999).formula == "2 + 10/N"
    assert of(stage=1, master="split24", state_format="int8", gradient_format="bf16").formula == "2 + 5.03/N"
    assert of(stage=3, master="split24", state_format="int8", gradient_format="bf16").formula == "7.03/N"
    assert of(stage=1, master="split24", state_format="int8", release_gradients=True).formula == "2 + 3.03/N"
    found = every_way([dataclasses.replace(way, release_gradients=True) for way in WAYS])
    # With a disk, binding refuses params on a GPU.
    assert {way.tier for way in found if way.release_gradients} == {"device", "host"}
    assert of(tier="disk").formula == "2 + 4/N, disk 12/N"
    host, disk = of(tier="host"), of(tier="disk")
    assert host.on("disk") == 0 and host.moved["bus"] == disk.moved["disk"] and disk.moved["bus"] == 0
    assert disk.moved["disk"] == 2 * disk.on("disk") == disk.file
    assert disk.on("disk") == pytest.approx(10**7 * 12 / 8, rel=0.01)
    resting = [of(tier=tier, sums_rest=True) for tier in ("host", "disk")]
    assert [each.formula for each in resting] == ["2, host 16/N", "2, host 4/N, disk 12/N"]
    sums = host.bytes["gradient"]["device"]
    assert [each.moved["bus"] for each in resting] == [host.moved["bus"] + 2 * sums, sums]
    assert [each.bytes["gradient"]["host"] for each in resting] == [sums, sums]


def test_the_cheapest_that_fits() -> None:
    needs = [need_of(stage, 8, 10**9) for stage in (0, 1, 2, 3)]
    assert cheapest(needs, 10**12).way.stage == 1
    assert cheapest(needs, needs[2].on("device") - 1).way.stage == 3
    assert cheapest(needs, 1000) is None


def test_the_cheapest_of_all_ways() -> None:
    low = [way for way in WAYS if way.dtype is torch.bfloat16 and way.has_module]
    needs = {way: plan(transformer(10**8), ADAMW, 8, way) for way in every_way(low)}
    everything = list(needs.values())
    # Sums rest in host memory at stage 2 and 3, beside states that are not on the device.
    assert len(everything) == 4 * 4 * 3 * 2 * 3 + 2 * 4 * 3 * 2 * 2 == len(set(needs))

    def best(device: int, host: int | None = None) -> Way:
        need = cheapest(everything, device, host)
        assert need is not None
        return need.way

    stage3 = Way(3, True, torch.bfloat16)
    whole = dataclasses.replace(stage3, master="split")
    assert best(needs[whole].on("device")) == whole  # exact, and on the device
    below = needs[whole].on("device") - 1
    assert best(below).tier == "host" and best(below).is_exact
    assert best(below, host=1000).is_exact is False  # a disk needs memory too
    on_disk = best(below, host=needs[dataclasses.replace(whole, tier="disk")].on("host"))
    assert (on_disk.tier, on_disk.is_exact) == ("disk", True)
    text = in_words(found(everything, below), everything, "AdamW", below)
    assert "none fits" not in text and "on host" in text and "offload='cpu'" in text
    assert "with less precision: stage" in text and "state_format=" in text.split("with less")[1]


def test_a_model_of_any_size_is_laid_out_alike() -> None:
    """Evenly, as known models: buffers are the three buckets of docs/stages.md, and 8 bytes for each block."""
    for numel in (10**9, 3 * 10**9, 7 * 10**9, 13 * 10**9, 30 * 10**9, 70 * 10**9):
        need = need_of(2, 8, numel)
        assert need.bytes["buffer"]["device"] <= 3 * 2**25 + 8 * numel / 8 / 256, f"{numel} params"


def test_what_holds_no_params_is_not_planned() -> None:
    for module, kind, words in (
        (7, TypeError, "module takes an nn.Module, found int"),
        (nn.ReLU(), ValueError, "ReLU has no params: nothing would be sharded"),
    ):
        with pytest.raises(kind, match=words):
            plan(module, ADAMW, 2, Way(1, True, torch.float32))  # type: ignore[arg-type]


def test_what_is_no_optimizer_and_no_way_is_refused() -> None:
    module = nn.Linear(4, 3)
    for optimizer in (torch.optim.AdamW, torch.optim.AdamW(module.parameters()), "AdamW", type(ADAMW), None):
        with pytest.raises(TypeError, match="optimizer takes an instance of a class of shardopt's"):
            plan(module, optimizer, 2, Way(1, True, torch.float32))  # type: ignore[arg-type]
    for field, value in (("dtype", "bf16"), ("dtype", 16), ("dtype", None), ("stage", None), ("stage", 4)):
        with pytest.raises((TypeError, ValueError), match=rf"Way\.{field}"):
            dataclasses.replace(Way(1, True, torch.float32), **{field: value})
    for field in ("tier", "master", "has_module"):
        with pytest.raises((TypeError, ValueError), match=rf"Way\.{field}"):
            dataclasses.replace(Way(1, True, torch.float32), **{field: "fp7"})
    for way in (None, "stage 1"):
        with pytest.raises(TypeError, match="way takes a Way"):
            plan(module, ADAMW, 2, way)  # type: ignore[arg-type]


def test_sizes() -> None:
    for numel in (1, 300, 10_001, 10_000_000, 7_000_000_000):
        assert sum(param.numel() for param in transformer(numel).parameters()) == numel
    read = {"80G": 80 * 10**9, "80GiB": 80 * 2**30, "7e9": 7 * 10**9, "1.5k": 1500, "2Mi": 2**21, "12": 12, "3B": 3}
    assert {text: parse_size(text) for text in read} == read
    for text in ("", "G", "1X", "nan", "inf", "-3", "1e999", "3i", "80Bi"):
        with pytest.raises(ValueError, match=r"is not a size: write 80G"):
            parse_size(text)
    counts = {"7B": 7 * 10**9, "7b": 7 * 10**9, "0.35T": 35 * 10**10, "350M": 35 * 10**7, "7e9": 7 * 10**9, "12": 12}
    assert {text: parse_count(text) for text in counts} == counts
    for text in ("", "B", "7X", "nan", "inf", "-7B", "7GB"):
        with pytest.raises(ValueError, match=r"is not a count: write 7B"):
            parse_count(text)
    text = table([need_of(3, 8)], 10_000_000, 10**9)
    assert "18/N" in text and text.splitlines()[0].split()[:3] == ["way", "param", "gradient"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chart.png"
    arguments = ["plan", "--params", "7e8", "--ranks", "8", "--device-memory", "8G", "--plot", str(file)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "cheapest that fits: stage 1, bfloat16, master split;" in printed and "4 + 12/N" in printed
    assert "    model.bfloat16()\n    ShardedAdamW(model, stage=1, master='split')" in printed
    assert "on disk" not in printed
    assert file.read_bytes().startswith(b"\x89PNG")
    shown = [
        "--master",
        "split24",
        "--state-format",
        "int8",
        "--gradient-format",
        "bf16",
        "--offload",
        "disk",
        "--ema",
        "--dtype",
        "bf16",
    ]
    assert main(["plan", "--params", "7e5", "--ranks", "8", *shown]) == 0
    printed = capsys.readouterr().out
    assert "stage 2, bfloat16, master split24, states int8, gradients bf16, ema, on disk" in printed
    assert "stage 1, params only, bfloat16, master split24, states int8, ema, on disk" in printed
    assert "2 + 2/N, disk 5.03/N" in printed and "cheapest" not in printed
    assert main(["plan", "--params", "7e5", "--all"]) == 0
    tiers = 6 * 3 * 3 + (2 + 4 * 2) * 4 * 3 * 3
    assert len(capsys.readouterr().out.splitlines()) == 3 + tiers + 2 * 3 * 2 + 2 * 2 * 4 * 3 * 2
    part = ["--offload", "cpu", "--offload-fraction", "0.4", "--dtype", "bf16"]
    assert main(["plan", "--params", "7e6", "--ranks", "8", *part]) == 0
    printed = capsys.readouterr().out
    assert "stage 2, bfloat16, 40% on host" in printed and "2 + 11.2/N, host 4.8/N" in printed
    with pytest.raises(SystemExit):
        main(["plan", "--params", "7e5", "--offload", "cpu", "--offload-fraction", "1.5"])
    assert "--offload-fraction" in capsys.readouterr().err
    assert main(["plan", "--params", "7e5", "--offload", "disk", "--offload-gradients"]) == 0
    printed = capsys.readouterr().out
    assert sum("on disk, gradients on host" in line for line in printed.splitlines()) == 4
    assert "2, host 4/N, disk 12/N" in printed
    assert main(["plan", "--params", "7e7", "--dtype", "bf16", "--release-gradients", "--device-memory", "1G"]) == 0
    printed = capsys.readouterr().out
    assert sum("released gradients" in line for line in printed.split("cheapest")[0].splitlines()) == 4
    assert "release_gradients=True)" in printed
    cut = ["--ranks", "8", "--dtype", "fp32", "--tensor", "2", "--pipeline", "2"]
    assert main(["plan", "--params", "7e5", *cut, "--device-memory", "1G"]) == 0
    printed = capsys.readouterr().out
    assert "8 ranks (tensor 2, pipeline 2; " in printed
    assert "(model, stage=1, process_group=mesh['dp'].get_group(), norm_group=dist.group.WORLD)" in printed
    cast = ["--compute-dtype", "bf16"]
    assert main(["plan", "--params", "7e5", "--ranks", "8", *cast, "--device-memory", "1G"]) == 0
    printed = capsys.readouterr().out
    assert "stage 3, float32, computed in bfloat16" in printed and "params only" not in printed
    formulas = [line.split() for line in printed.split("cheapest")[0].splitlines()]
    assert sum("16/N" in words and "+" in words for words in formulas) == 2  # 2 + 16/N at stages 1 and 2
    assert sum("16/N" in words and "+" not in words for words in formulas) == 1  # at stage 3
    assert "compute_dtype=torch.bfloat16)" in printed
    for wrong, words in (
        (["--tensor", "3"], "3 divides"),
        ([*cast, "--dtype", "bf16"], "omit --dtype bf16"),
        (["--experts", "2", "--ranks", "2"], "called experts"),
    ):
        assert main(["plan", "--params", "7e5", *wrong]) == 1 and words in capsys.readouterr().err
    least = ["--device-memory", "80M", "--dtype", "bf16", "--optimizer", "SGD"]
    assert main(["plan", "--params", "7e7", *least]) == 1
    assert "none fits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_chart_of_all_ways(tmp_path: Path) -> None:
    assert main(["plan", "--params", "7e5", "--all", "--plot", str(tmp_path / "all.svg")]) == 0
    assert "<svg" in (tmp_path / "all.svg").read_text()


def test_doctor(tmp_path: Path) -> None:
    text = report(facts_of(tmp_path))
    for word in ("python", "torch", "backends", "pinned memory", "direct I/O", shardopt.__version__):
        assert word in text
    assert "refused" in facts_of(tmp_path / "missing")["direct I/O"]
    done = run_module("shardopt", "doctor", cwd=tmp_path)
    assert done.returncode == 0 and "gloo" in done.stdout, done.stderr


def test_doctor_looks_for_what_triton_compiles_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line() -> str:
        return facts_of(tmp_path)["C compiler"]

    header, compiler = tmp_path / "Python.h", tmp_path / "my-cc"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path) if name == "include" else None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "missing: a C compiler" in line() and f"and {header}; Triton" in line()
    header.touch()
    assert "missing: a C compiler" in line() and str(header) not in line()
    compiler.touch(0o755)
    monkeypatch.setenv("CC", "my-cc")
    assert "missing" not in line() and str(compiler) in line()
    header.unlink()
    assert f"missing: {header}; Triton" in line()
    (tmp_path / "gcc").touch(0o755)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "missing: a C compiler" in line()  # Triton takes no other one
    monkeypatch.delenv("CC")
    assert "a C compiler" not in line()
