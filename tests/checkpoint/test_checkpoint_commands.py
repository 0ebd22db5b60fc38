"""The command line, and files that the safetensors library and torch read."""

import copy
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors
import safetensors.torch
import torch

import shardopt
from shardopt import ShardedMuon, save_checkpoint
from shardopt.__main__ import main
from shardopt.checkpoint import files
from tests.support.checkpoints import build, save, train
from tests.support.cuts import small_chunks
from tests.support.ranks import Pool


def trained(root: Path, stage: int) -> Any:
    """Two steps, saved; what the exports must hold, from rank 0."""
    model, optimizer = build(stage)
    train(model, optimizer, range(2))
    path = save(root, model, optimizer, extra={"epoch": 3, "noise": torch.ones(2)})
    optimizer.consolidate_state_dict(to=0)
    with optimizer.unsharded():
        weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    weights |= {name: tensor for name, tensor in model.named_buffers() if name != "scratch"}
    return path, weights, optimizer.state_dict() if torch.distributed.get_rank() == 0 else {}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(*(x.view(torch.uint8) for x in flat))


def test_exports_and_files_are_read_by_torch_and_safetensors(
    ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, weights, states = ranks.run(trained, tmp_path / "runs", 3, world=2)[0]
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        with safetensors.safe_open(path / name, "pt") as file:
            assert file.metadata()["rank"] == str(int(name[5:10]))
            for key in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(key)
                section, _, kind = key.partition("/")
                if section == "buffers":
                    assert same_bits(tensor, weights[kind.split("/")[0]]), key

    assert main(["export", str(tmp_path / "runs"), "--to", "safetensors", str(tmp_path / "w.safetensors")]) == 0
    exported = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert set(exported) == set(weights)
    for index, name in enumerate(weights):
        if weights[name].dtype is torch.bfloat16:
            number = next(
                number
                for number, each in states["state"].items()
                if "master" in each and each["master"].shape == weights[name].shape
            )
            assert same_bits(exported[name], states["state"][number]["master"]), (index, name)
        else:
            assert same_bits(exported[name], weights[name]), name

    assert main(["export", str(path), "--to", "torch", str(tmp_path / "opt.pt")]) == 0
    loaded = torch.load(tmp_path / "opt.pt", weights_only=True)
    assert loaded["param_groups"] == states["param_groups"]
    assert loaded["state"].keys() == states["state"].keys()
    for number, state in states["state"].items():
        assert loaded["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert same_bits(loaded["state"][number][key], value), (number, key)
    params = [torch.nn.Parameter(torch.zeros_like(state["exp_avg"])) for state in states["state"].values()]
    fresh = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}], amsgrad=True)
    fresh.load_state_dict(loaded)
    assert fresh.param_groups[0]["lr"] == 0.01 and not list(tmp_path.glob("*.part-*"))

    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "runs")]) == 0
    table = capsys.readouterr().out
    assert "step 2, written by 2 rank(s)" in table and "adam" in table
    assert any("cells.4.weight" in line and "exp_avg_sq" in line and "[24, 24]" in line for line in table.splitlines())


@pytest.mark.parametrize("names", [True, False], ids=["each group names its rule", "one does not"])
def test_two_rules_are_exported_as_two_classes(names: bool, tmp_path: Path) -> None:
    """torch's Muon and AdamW load what one optimizer of both kinds saved, and go on as it does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 7))
    own = list(model.parameters())
    groups = [{"params": [own[1]]}, {"params": [own[0], *own[2:]], "rule": "adamw"}]
    optimizer = ShardedMuon(model if names else groups, lr=0.02, adamw={"lr": 0.01})
    optimizer.param_groups[0]["of"] = "the user"

    def backward(params: Sequence[torch.Tensor]) -> None:
        for number, param in enumerate(params):
            param.grad = torch.linspace(-1, 1, param.numel()).view_as(param) * (number + 1)

    backward(list(model.parameters()))
    optimizer.step()
    save_checkpoint(tmp_path / "runs", model, optimizer)
    assert main(["export", str(tmp_path / "runs"), "--to", "torch", str(tmp_path / "opt.pt")]) == 0
    loaded = torch.load(tmp_path / "opt.pt", weights_only=True)
    assert loaded.keys() == {"Muon", "AdamW"} and loaded["Muon"]["param_groups"][0]["of"] == "the user"
    twin = copy.deepcopy(list(model.parameters()))
    hidden, others = [twin[1]], [twin[0], *twin[2:]]
    both = torch.optim.Muon(hidden), torch.optim.AdamW(others)
    for each in both:
        saved, own = loaded[type(each).__name__], each.state_dict()["param_groups"][0].keys()
        assert saved["param_groups"][0].keys() - {"of"} == own
        each.load_state_dict(saved)
    backward(list(model.parameters()))
    backward(twin)
    for each in (optimizer, *both):
        each.step()
    for number, (mine, theirs) in enumerate(zip(model.parameters(), twin, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=0 if number == 1 else 1e-6, atol=0 if number == 1 else 1e-7)


def test_all_of_an_export_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, range(1))
    save(tmp_path / "runs", model, optimizer)
    (tmp_path / "mine").touch()
    synced: list[bytes] = []
    renamed: list[bytes] = []
    modes: list[int] = []

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").read_bytes())
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))

    def rename(source: Path, target: Path) -> None:
        renamed.append(source.read_bytes())
        os.rename(source, target)

    with patch.object(files, "sync", sync), patch.object(files, "rename", rename):
        for kind in ("safetensors", "torch"):
            assert main(["export", str(tmp_path / "runs"), "--to", kind, str(tmp_path / kind)]) == 0
            assert renamed[-1] == synced[-1] == (tmp_path / kind).read_bytes()
            assert (tmp_path / kind).stat().st_mode == (tmp_path / "mine").stat().st_mode  # by the umask, both
            for mode in (0o600, 0o664):  # those of the file that is replaced, from the first byte on
                (tmp_path / kind).chmod(mode)
                assert main(["export", str(tmp_path / "runs"), "--to", kind, str(tmp_path / kind)]) == 0
                assert modes[-1] == stat.S_IMODE((tmp_path / kind).stat().st_mode) == mode
    assert len(renamed) == 6


def test_carried_scalars_and_params_without_a_state_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's NAdam goes on from the file; a param that no step has reached begins there as it would here."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(4))]
    module, optimizer = torch.nn.ParameterList(params), shardopt.ShardedNAdam(params, lr=0.125)
    for step in range(3):
        params[0].grad = torch.full((5, 3), 1.0 + step)
        optimizer.step()
    save_checkpoint(tmp_path / "runs", module, optimizer)
    assert main(["export", str(tmp_path / "runs"), "--to", "torch", str(tmp_path / "opt.pt")]) == 0
    loaded = torch.load(tmp_path / "opt.pt", weights_only=True)
    assert loaded["state"].keys() == {0} and loaded["state"][0].keys() == optimizer.state[params[0]].keys()
    for name, value in optimizer.state[params[0]].items():
        assert same_bits(loaded["state"][0][name], value), name
    twins = copy.deepcopy(params)
    theirs = torch.optim.NAdam(twins, lr=7.0)
    theirs.load_state_dict(loaded)
    for its_params, each in ((params, optimizer), (twins, theirs)):
        for param in its_params:
            param.grad = torch.ones_like(param)
        each.step()
    for mine, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-6, atol=1e-7)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "runs"), "--to", "torch", str(tmp_path / "x.pt"), "--optimizer", "1"]) == 1
    assert "give --optimizer below 1" in capsys.readouterr().err and not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_an_export_that_fails_leaves_what_was_there(kind: str, tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, range(1))
    path = save(tmp_path / "runs", model, optimizer)
    (tmp_path / "out").write_text("of before")
    data = path / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-2000] + bytes(2000))  # the elements that are read last
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    data.write_bytes(damaged)
    assert main(["export", str(tmp_path / "runs"), "--to", kind, str(tmp_path / "out")]) == 1
    assert (tmp_path / "out").read_text() == "of before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "runs"]


def test_inspect_tells_what_was_accumulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = shardopt.ShardedSGD(model, lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    with optimizer.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    save_checkpoint(tmp_path, model, optimizer)
    assert main(["inspect", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "gradient" in line]
    assert [row[:5] for row in rows if row[0] == "weight"] == [
        ["weight", "gradient", "of", "rank", "0"],
        ["weight", "gradient", "[2,", "3]", "F32"],
    ], rows


def test_values_may_take_more_bytes_than_what_was_saved_of_them(tmp_path: Path) -> None:
    """The low halves of split masters take two bytes an element, or one; a chunk of them is exported as fp32."""
    for master in ("split", "split24"):
        param = torch.nn.Parameter(torch.randn(40, 30).t().bfloat16())
        module = torch.nn.ParameterDict({"weight": param})
        optimizer = shardopt.ShardedAdamW(module.parameters(), lr=0.1, master=master)
        param.grad = torch.randn_like(param)
        optimizer.step()
        with small_chunks():
            shardopt.save_checkpoint(tmp_path / master, module, optimizer)
            assert main(["export", str(tmp_path / master), "--to", "safetensors", str(tmp_path / "weights")]) == 0
        exported = safetensors.torch.load_file(tmp_path / "weights")
        assert same_bits(exported["weight"], optimizer.state[param]["master"])


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_each_command_tells_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert "DIR" in told and len(told) > 300


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build(1)
    train(model, optimizer, range(1))
    first = save(tmp_path, model, optimizer)
    second = save(tmp_path, model, optimizer)
    assert main(["verify", str(tmp_path), "--all"]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    file = first / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", str(first)]) == 1
    assert main(["verify", str(tmp_path), "--all"]) == 1
    told = capsys.readouterr().out
    assert "rank-00000.safetensors" in told and "elements [" in told and second.name in told
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert "not a directory" in capsys.readouterr().err
