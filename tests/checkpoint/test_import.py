"""Checkpoints that DeepSpeed, FSDP2, ZeroRedundancyOptimizer and torch wrote (tests/fixtures), bit for bit, and on."""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import shardopt
from shardopt.__main__ import main
from shardopt.checkpoint.foreign.name_by_order import name_by_order
from shardopt.checkpoint.foreign.unpickle import read_file
from shardopt.checkpoint.publish import find
from shardopt.checkpoint.reader import Checkpoint
from shardopt.checkpoint.records import TensorKey
from tests.support.paths import FIXTURES
from tests.support.ranks import Pool
from tests.support.tiny import DECAY, HYPER, Tiny, groups, loss
from tests.support.training import raw

CLEAR = ["--frozen", "fixed.*", "--buffers", "scale"]
CASES: dict[str, list[str]] = {
    "plain": ["plain/optimizer.pt", "plain/model.safetensors", *CLEAR],
    "zero_redundancy": ["zero_redundancy/model.pt", "zero_redundancy/optimizer.pt", *CLEAR],
    "fsdp2": ["fsdp2", *CLEAR],
    "deepspeed1": ["deepspeed1"],
    "deepspeed1bf16": ["deepspeed1bf16"],
    "deepspeed2": ["deepspeed2/step3"],
    "deepspeed3": ["deepspeed3"],
    "deepspeed3cpuadam": ["deepspeed3cpuadam", "--optimizer", "AdamW"],
}


def import_case(case: str, target: Path, *more: str) -> int:
    sources = [str(FIXTURES / each) if (FIXTURES / each).exists() else each for each in CASES[case]]
    first_option = next((at for at, each in enumerate(sources) if each.startswith("--")), len(sources))
    return main(["import", *sources[:first_option], str(target), *sources[first_option:], *more])


def expected(case: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    folder = FIXTURES / case
    return load_file(folder / "expected.safetensors"), json.loads((folder / "expected.json").read_text())["steps"]


def check_values(runs: Path, case: str) -> None:
    tensors, steps = expected(case)
    with Checkpoint(find(runs)) as checkpoint:
        manifest = checkpoint.manifest
        found = {
            f"{'buffer' if key.section == 'buffers' else key.kind}/{key.name}": checkpoint.whole(key)
            for key in manifest.tensors
        }
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape, name
            assert raw(found[name]) == raw(tensor), name
        assert {name: about.step for name, about in manifest.params.items() if about.has_state} == steps
        assert len(steps) >= 6 and set(steps.values()) == {3}
        aliases = {name: about.aliases for name, about in manifest.params.items() if about.aliases}
        assert aliases == ({} if case in ("fsdp2", "plain") else {"embed.weight": ("head.weight",)})
        hyper = [group.values for group in manifest.optimizers[0].groups]
    assert [(group["lr"], group["weight_decay"]) for group in hyper] == [(0.01, DECAY), (0.02, 0.0)]
    assert all(group["decoupled_weight_decay"] and group["eps"] == HYPER["eps"] for group in hyper)


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_the_one_that_the_library_had(case: str, tmp_path: Path) -> None:
    assert import_case(case, tmp_path / "runs") == 0
    check_values(tmp_path / "runs", case)
    assert main(["verify", str(tmp_path / "runs")]) == 0


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_rules_that_look_at_whole_params(name: str, is_distributed: bool, tmp_path: Path) -> None:
    """Their states are rows and columns, or count no steps; nothing says which class it was, or names its params."""

    def model_of_matrices() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(*sizes, bias=name == "Adafactor") for sizes in ((7, 5), (5, 3))))

    model = model_of_matrices()
    theirs = getattr(torch.optim, name)(model.parameters(), lr=0.25)
    for _ in range(2):
        theirs.zero_grad()
        model(torch.randn(4, 7)).square().sum().backward()
        theirs.step()
    if is_distributed:
        as_distributed(tmp_path / "both", get_optimizer_state_dict(model, theirs), model.state_dict())
    else:
        torch.save({"model": model.state_dict(), "optimizer": theirs.state_dict()}, tmp_path / "both")
    assert main(["import", str(tmp_path / "both"), str(tmp_path / "runs")]) == 0
    again = model_of_matrices()
    optimizer = getattr(shardopt, f"Sharded{name}")(again.parameters(), lr=9.0)
    shardopt.load_checkpoint(tmp_path / "runs", again, optimizer)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.25
    found, expected = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    assert found.keys() == expected.keys() and len(found) == len(list(model.parameters()))
    for number, state in expected.items():
        assert found[number].keys() == state.keys()
        assert all(torch.equal(found[number][kind], tensor) for kind, tensor in state.items()), number
    assert main(["export", str(tmp_path / "runs"), "--to", "torch", str(tmp_path / "again.pt")]) == 0
    exported = torch.load(tmp_path / "again.pt", weights_only=True)["state"]
    for number, state in expected.items():
        assert all(torch.equal(exported[number][kind], tensor) for kind, tensor in state.items()), number


def model_of(case: str) -> torch.nn.Module:
    """As it was in the library, with values that the checkpoint must replace."""
    model = Tiny()
    if case == "fsdp2":
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    low = expected(case)[0]["param/norm.weight"].dtype
    with torch.no_grad():
        for param in model.parameters():
            param.data = torch.full_like(param, 7.0).to(low)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def steps_on(case: str) -> range:
    """Three; one in bf16, where a param that rounds to its other neighbour changes all gradients after it."""
    return range(3, 6) if expected(case)[0]["param/norm.weight"].dtype is torch.float32 else range(3, 4)


def go_on(case: str, root: Path, stage: int) -> dict[str, torch.Tensor]:
    """Some steps from the import; full-precision params and moments, whole on rank 0."""
    model = model_of(case)
    options: dict[str, Any] = {"amsgrad": True} if case == "plain" else {}
    options["tuning"] = shardopt.Tuning(keep_below=0)  # or stage 3 keeps these small params whole, as stage 2 does
    optimizer = shardopt.ShardedAdamW(groups(model), lr=9.0, module=model, stage=stage, **options)
    shardopt.load_checkpoint(root, model, optimizer)
    assert ("embed" in optimizer.units) == (stage == 3)  # its param is trained; that of "fixed" is sharded by itself
    for step in steps_on(case):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    with optimizer.unsharded():
        found = {f"param/{name}": param.detach().clone() for name, param in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"{kind}/{order[index]}": value.clone() for kind, value in state.items()}
    optimizer.close()
    return found


def torch_goes_on(case: str) -> dict[str, torch.Tensor]:
    """The same with torch.optim.AdamW, on the fp32 masters where there are any."""
    tensors, steps = expected(case)
    model = model_of(case)
    params = dict(model.named_parameters())
    masters = {name: tensors.get(f"master/{name}", tensors[f"param/{name}"]).clone() for name in params}
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(tensors[f"param/{name}"])
        for name, buffer in model.named_buffers():
            buffer.copy_(tensors[f"buffer/{name}"])
    name_of = {param: name for name, param in params.items()}
    on_masters = [
        {**group, "params": [masters[name_of[param]].requires_grad_() for param in group["params"]]}
        for group in groups(model)
    ]
    order = [name_of[param] for group in groups(model) for param in group["params"]]
    optimizer = torch.optim.AdamW(on_masters, **HYPER, amsgrad=case == "plain")
    saved = optimizer.state_dict()
    for index, name in enumerate(order):
        saved["state"][index] = {key.split("/")[0]: t for key, t in tensors.items() if key.endswith(f"/{name}")}
        saved["state"][index] = {k: t.clone() for k, t in saved["state"][index].items() if k not in ("param", "master")}
        saved["state"][index]["step"] = torch.tensor(float(steps[name]))
    optimizer.load_state_dict(saved)
    for step in steps_on(case):
        model.zero_grad()
        loss(model, step).backward()
        for name, master in masters.items():
            grad = params[name].grad
            master.grad = None if grad is None else grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(masters[name])
    found = {f"param/{name}": param.detach() for name, param in params.items()}
    found |= {f"master/{name}": master.detach() for name, master in masters.items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{kind}/{order[index]}": value for kind, value in state.items()}
    return found


def all_go_on(root: Path, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    return {case: go_on(case, root / case, stage) for case in CASES}


def test_training_goes_on_as_in_torch(ranks: Pool, tmp_path: Path) -> None:
    wanted, moved = {}, {}
    for case in CASES:
        assert import_case(case, tmp_path / case) == 0
        wanted[case] = ranks.run(torch_goes_on, case, world=1)[0]  # there: bf16 sums depend on the number of threads
        moved[case] = expected(case)[0]
    for world, stage in ((1, 1), (2, 2), (3, 3)):
        for case, found in ranks.run(all_go_on, tmp_path, stage, world=world)[0].items():
            assert found.keys() <= wanted[case].keys() and "exp_avg_sq/norm.bias" in found
            for name, value in found.items():
                # Moments within some ulp, params within some of their own or of the step, about lr.
                low = value.dtype is torch.bfloat16
                rtol, atol = (8e-3, 1e-4) if low else (3e-6, 1e-7)
                torch.testing.assert_close(value, wanted[case][name], rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)
                if name.startswith(("param", "exp_avg/")) and not name.startswith("param/fixed"):
                    assert not torch.equal(value, moved[case][name])


# -- what is not clear is asked for, what is damaged refused; nothing is written ---------------------------------------


def refused(capsys: pytest.CaptureFixture[str], target: Path, *arguments: str) -> str:
    before = sorted(target.parent.iterdir())
    assert main(["import", *arguments]) == 1
    assert not target.exists() and sorted(target.parent.iterdir()) == before
    return capsys.readouterr().err


def test_what_is_not_clear_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "runs"
    plain = [str(FIXTURES / "plain" / name) for name in ("optimizer.pt", "model.safetensors")]
    told = refused(capsys, target, *plain, str(target))
    assert "fixed.weight" in told and "--frozen" in told and "--buffers" in told
    by_number = [str(FIXTURES / "zero_redundancy" / name) for name in ("optimizer.pt", "model.pt")]
    told = refused(capsys, target, *by_number, str(target))  # (5,) is also the shape of a buffer
    assert "--names" in told and "ways" in told
    names = tmp_path / "names.txt"
    names.write_text("embed.weight\nhidden.weight\nback.weight\nnorm.weight\nnorm.bias\n")
    assert "5 names" in refused(capsys, target, *by_number, str(target), "--names", str(names))
    names.write_text("embed.weight\nhidden.weight\nback.weight\nnorm.weight\nnorm.bias\nhidden.bias\n")
    assert main(["import", *by_number, str(target), "--names", str(names), *CLEAR]) == 0
    other = tmp_path / "other"
    names.write_text("embed.weight\nback.weight\nhidden.weight\nnorm.weight\nnorm.bias\nhidden.bias\n")
    assert "shape" in refused(capsys, other, *by_number, str(other), "--names", str(names), *CLEAR)
    adam = str(FIXTURES / "deepspeed3cpuadam")
    assert "--optimizer" in refused(capsys, other, adam, str(other))
    assert "Lion needs other states" in refused(capsys, other, adam, str(other), "--optimizer", "Lion")
    assert "--from" in refused(capsys, other, str(tmp_path), str(other))
    assert "not there" in refused(capsys, other, str(tmp_path / "x"), str(other))
    assert "optimizer state dicts" in refused(capsys, other, plain[1], str(other))


def test_what_does_not_belong_together_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of other params, several models, a count that is none, half of a file: nothing is guessed or written."""
    target, first, second = tmp_path / "runs", tmp_path / "first.pt", tmp_path / "second.pt"

    def told(*sources: Path, more: tuple[str, ...] = ()) -> str:
        return refused(capsys, target, *map(str, sources), str(target), *more)

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    weights, states = model.state_dict(), optimizer.state_dict()
    torch.save(states, first)
    torch.save(weights, second)
    names = tmp_path / "names.txt"
    for listed, words in (
        (["0.weight", "0.bias", "0.weight", "1.bias"], "give each param of the optimizer a name of its own"),
        (["module.0.weight", "0.bias", "1.weight", "1.bias"], "['module.0.weight'] are not in the model's state dict"),
    ):
        names.write_text("\n".join(listed))
        assert words in told(first, second, more=("--names", str(names)))
    assert "give one folder to --from dcp, found 2 sources" in told(first, second, more=("--from", "dcp"))
    torch.save({"student": weights, "teacher": weights}, second)
    assert "has 2 dicts of tensors, at ['1.student', '1.teacher']" in told(first, second)
    torch.save(weights, second)
    for step in (2.5, -1.0):
        states["state"][2]["step"] = torch.tensor(step)
        torch.save(states, first)
        assert f"the step count of '1.weight' is {step}" in told(first, second)
    half = tmp_path / "half.safetensors"
    whole = (FIXTURES / "plain" / "model.safetensors").read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    assert "half.safetensors is not a whole safetensors file" in told(FIXTURES / "plain" / "optimizer.pt", half)
    # Pieces of a distributed checkpoint that overlap, though they have as many elements as the tensor.
    folder = copied("fsdp2", tmp_path)
    index = pickle.loads((folder / ".metadata").read_bytes())
    pieces = index.state_dict_metadata["model.hidden.weight"].chunks
    assert len(pieces) == 2
    pieces[1].offsets = torch.Size([pieces[0].offsets[0] + 1, *pieces[1].offsets[1:]])
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert "the pieces of 'model.hidden.weight'" in told(folder, more=(*CLEAR, "--from", "dcp"))


def test_names_by_order() -> None:
    model = {"a": (3, 2), "a.b": (3,), "b": (3, 2), "c": (4,)}
    assert name_by_order([[(3, 2), (3,), (3, 2), (4,)]], model) == [["a", "a.b", "b", "c"]]
    assert name_by_order([[(3, 2), (3, 2)], [(3,), (4,)]], model) == [["a", "b"], ["a.b", "c"]]
    assert name_by_order([[(3, 2), None, (4,)]], {"a": (3, 2), "b": (1,), "c": (4,)}) == [["a", "b", "c"]]
    for groups_of in ([[(3, 2)]], [[(3, 2)], [(3, 2)]], [[(9,)]], [[(3,), (3, 2), (3, 2)]], [[None], [(4,)]]):
        with pytest.raises(shardopt.CheckpointError, match="--names"):
            name_by_order(groups_of, model)


class Evil:
    """A file that would leave a mark when its code runs."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def copied(case: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / case, to / case))


def test_no_code_of_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, target = tmp_path / "mark", tmp_path / "runs"
    folder = copied("fsdp2", tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    assert "pathlib" in refused(capsys, target, str(folder), str(target))
    for name in ("os.system", "builtins.eval", "torch.load", "collections.Counter"):
        module, _, attribute = name.rpartition(".")
        (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n(S'touch {mark}'\ntR.".encode())
        assert name in refused(capsys, target, str(folder), str(target))
    evil = tmp_path / "evil.pt"
    torch.save({"state": {}, "param_groups": [{"params": []}], "x": Evil(mark)}, evil)
    told = refused(capsys, target, str(evil), str(FIXTURES / "plain/model.safetensors"), str(target))
    assert "evil.pt" in told and "Nothing was imported" in told
    deep = copied("deepspeed2", tmp_path)
    states = next(deep.rglob("mp_rank_00_model_states.pt"))
    torch.save({"module": Evil(mark)}, states)
    assert states.name in refused(capsys, target, str(deep), str(target))
    assert not mark.exists()


def without_a_rank(folder: Path) -> None:
    next(folder.rglob("*pp_rank_1_mp_rank_00_optim_states.pt")).unlink()


def without_the_model(folder: Path) -> None:
    for path in folder.rglob("*model_states.pt"):
        path.unlink()


def of_a_split_model(folder: Path) -> None:
    path = next(folder.rglob("*pp_rank_1_mp_rank_00_optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def twice(folder: Path) -> None:
    path = next(folder.rglob("*pp_rank_1_mp_rank_00_optim_states.pt"))
    shutil.copy(path, path.with_name(f"fp16_{path.name.removeprefix('bf16_')}"))


def truncated(folder: Path) -> None:
    path = max(folder.rglob("*_states.pt"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("case", ["deepspeed2", "deepspeed3"])
@pytest.mark.parametrize("damage", [without_a_rank, without_the_model, of_a_split_model, twice, truncated])
def test_a_damaged_folder_of_deepspeed_is_refused(
    case: str, damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(case, tmp_path)
    damage(folder)
    assert "othing was imported" in refused(capsys, tmp_path / "runs", str(folder), str(tmp_path / "runs"))


def test_slices_of_deepspeed_that_contradict_its_own_table_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied("deepspeed2", tmp_path)
    path = next(folder.rglob("mp_rank_00_model_states.pt"))
    saved = torch.load(path, weights_only=True)
    first = saved["param_shapes"][0]
    saved["param_shapes"][0] = dict(reversed(first.items()))
    torch.save(saved, path)
    assert "own table" in refused(capsys, tmp_path / "runs", str(folder), str(tmp_path / "runs"))


def test_a_damaged_distributed_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "runs"
    arguments = [str(tmp_path / "fsdp2"), str(target), *CLEAR]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        folder = copied("fsdp2", tmp_path)
        whole = (folder / name).read_bytes()
        for cut in (len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:cut])
            told = refused(capsys, target, *arguments)
            assert (name in told and "truncated" in told) or "Nothing of it was run" in told
        (folder / name).unlink()
        refused(capsys, target, *arguments, "--from", "dcp")
        shutil.rmtree(folder)
    # The index may not lead out of the folder.
    folder = copied("fsdp2", tmp_path)
    index = folder / ".metadata"
    shutil.copy(folder / "__0_0.distcp", tmp_path / "aaaaa.distcp")
    index.write_bytes(index.read_bytes().replace(b"\x0c__0_0.distcp", b"\x0c../aaaaa.dis"))
    assert "not a file of this folder" in refused(capsys, target, *arguments)


def test_both_dicts_in_one_file(tmp_path: Path) -> None:
    model = torch.load(FIXTURES / "zero_redundancy/model.pt", weights_only=True)
    optimizer = torch.load(FIXTURES / "zero_redundancy/optimizer.pt", weights_only=True)
    torch.save({"epoch": 3, "model": model, "optimizer": optimizer, "rng": torch.zeros(3)}, tmp_path / "both.pt")
    assert main(["import", str(tmp_path / "both.pt"), str(tmp_path / "runs"), *CLEAR]) == 0
    with Checkpoint(find(tmp_path / "runs")) as checkpoint:
        assert checkpoint.manifest.params["embed.weight"].aliases == ("head.weight",)
        assert len(checkpoint.manifest.params) == 8


def as_distributed(folder: Path, optimizer: Any, weights: dict[str, torch.Tensor], flat: bool = False) -> None:
    """Of one process, with torch's own writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {**weights, "optim": optimizer} if flat else {"model": weights, "optim": optimizer}, checkpoint_id=folder
        )


@pytest.mark.parametrize("form", ["by number", "by name", "flat"])
def test_other_forms_of_distributed_checkpoints(form: str, tmp_path: Path) -> None:
    """Of torch.optim itself, with and without names, and flat as some frameworks save it."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(named if form == "by name" else [param for _, param in named], lr=0.25)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    saved: Any = optimizer
    if form == "flat":
        states = StateDictOptions(flatten_optimizer_state_dict=True)
        saved = get_optimizer_state_dict(model, optimizer, options=states)
        assert "state.0.weight.exp_avg" in saved
    as_distributed(tmp_path / "dcp", saved, model.state_dict(), flat=form == "flat")
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "runs")]) == 0
    with Checkpoint(find(tmp_path / "runs")) as checkpoint:
        (group,) = checkpoint.manifest.optimizers[0].groups
        assert group.params == tuple(name for name, _ in named) and group.values["lr"] == 0.25
        for name, param in named:
            assert checkpoint.manifest.params[name].step == 2
            for kind in ("exp_avg", "exp_avg_sq"):
                assert raw(checkpoint.whole(TensorKey("params", name, kind))) == raw(optimizer.state[param][kind]), name
            assert raw(checkpoint.whole(TensorKey("params", name, "param"))) == raw(param.detach()), name


def test_the_help_says_that_it_unpickles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["import", "--help"])
    told = capsys.readouterr().out
    assert all(word in told for word in ("SOURCE", "OUT", "pickles", "restricted", "inert", "deepspeed", "dcp"))


def test_a_deepspeed_checkpoint_of_one_rank(tmp_path: Path) -> None:
    """The fixture's two partitions in one file, as one process writes them."""
    source, target = FIXTURES / "deepspeed1" / "step3", tmp_path / "ds" / "step3"
    target.mkdir(parents=True)
    shutil.copy(source / "mp_rank_00_model_states.pt", target)
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    first, second = (read_file(source / name.format(rank)) for rank in range(2))
    one, other = first["optimizer_state_dict"], second["optimizer_state_dict"]
    states, others = one["base_optimizer_state"]["state"], other["base_optimizer_state"]["state"]
    parts = one["single_partition_of_fp32_groups"], other["single_partition_of_fp32_groups"]
    joined = {
        "zero_stage": 1,
        "partition_count": [1, 1],
        "group_paddings": other["group_paddings"],
        "param_alignment_paddings": one["param_alignment_paddings"],
        "single_partition_of_fp32_groups": [torch.cat(pair) for pair in zip(*parts, strict=True)],
        "base_optimizer_state": {
            "param_groups": one["base_optimizer_state"]["param_groups"],
            "state": {
                index: {
                    kind: value if kind == "step" else torch.cat([value, others[index][kind]])
                    for kind, value in state.items()
                }
                for index, state in states.items()
            },
        },
    }
    torch.save({**first, "optimizer_state_dict": joined}, target / name.format(0))
    assert main(["import", str(target), str(tmp_path / "runs")]) == 0
    check_values(tmp_path / "runs", "deepspeed1")
