"""A manifest with a right digest and wrong content: one clear error, before any value changes; never a raw one."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from shardopt import CheckpointError, ShardedAdamW, ShardedNAdam
from shardopt.checkpoint.inspect import describe, verify
from shardopt.checkpoint.schema import is_dense
from shardopt.checkpoint.values import MOST_LEVELS
from tests.support.checkpoints import draws, facts, save
from tests.support.training import raises

Content = dict[str, Any]
Forge = Callable[[Content], Any]


class Counting(nn.Linear):
    """A layer with a state of its own, beside params and buffers."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "shape": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def built(seed: int, kind: Any = ShardedAdamW, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(Counting(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    optimizer = kind(model, lr=0.1, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    return model, optimizer


def forged(path: Path, change: Forge) -> None:
    """Writes the manifest anew, with another content and the digest of that."""
    content = json.loads((path / "manifest.json").read_bytes())["manifest"]
    replaced = change(content)
    write(path, json.dumps(replaced if isinstance(replaced, dict) and "version" in replaced else content))


def write(path: Path, text: str) -> None:
    body = text.encode() + b"}\n"
    digest = hashlib.sha256(body).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{"sha256": "' + digest + b'",\n"manifest": ' + body)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def weight(content: Content, kind: str = "param") -> Any:
    return content["tensors"]["params"]["0.weight"][kind]


def about(content: Content) -> Any:
    return content["params"]["0.weight"]


def in_blocks(content: Content, blocks: list[Any]) -> None:
    """The param is made up of blocks: of each there is a tensor of its shape, which has bytes of its own."""
    about(content).update(shape=[64, 16], blocks=blocks)
    params, done = content["tensors"]["params"], 0
    kinds = params.pop("0.weight")
    for (row, _), (rows, _) in blocks:
        name = f"0.weight[{row}:{row + rows}, 0:16]"
        params[name] = {kind: rows_of(tensor, done, rows) for kind, tensor in kinds.items()}
        done += rows


def rows_of(tensor: Any, first: int, rows: int) -> Any:
    (whole,) = tensor["ranges"]
    span = {**whole, "start": 0, "stop": 16 * rows, "offset": whole["offset"] + 64 * first}
    return {**tensor, "shape": [rows, 16], "ranges": [span]}


def in_blocks_of_another_shape(content: Content) -> None:
    in_blocks(content, [[[0, 0], [32, 16]], [[32, 0], [32, 16]]])
    content["tensors"]["params"]["0.weight[0:32, 0:16]"]["exp_avg"].update(shape=[16, 32], strides=[32, 1])


def group(content: Content) -> Any:
    return content["optimizers"][0]["groups"][0]


# What the manifest's own check refuses: `verify` names it, without a model.
SAYS: dict[str, Forge] = {
    "strides of other elements": lambda c: weight(c).update(strides=[1, 1]),
    "strides with gaps": lambda c: weight(c).update(strides=[32, 2]),
    "strides beyond memory": lambda c: weight(c).update(strides=[1 << 61, 1]),
    "strides of none": lambda c: weight(c).update(strides=[0, 0]),
    "strides of a state": lambda c: weight(c, "exp_avg").update(strides=[1, 1]),
    "strides of a buffer": lambda c: c["tensors"]["buffers"]["1.running_mean"]["value"].update(strides=[0]),
    "strides of extra": lambda c: c["tensors"]["extra"]["0"]["value"].update(strides=[7]),
    "too few strides": lambda c: weight(c).update(strides=[1]),
    "a shape that is a text": lambda c: weight(c).update(shape="16"),
    "a tensor that is a list": lambda c: c["tensors"]["params"]["0.weight"].update(param=[]),
    "kinds that are a list": lambda c: c["tensors"]["params"].update({"0.weight": []}),
    "sections that are a list": lambda c: c.update(tensors=[]),
    "a section that nobody knows": lambda c: c["tensors"].update(more={"a": {"value": weight(c)}}),
    "a dtype that nobody knows": lambda c: weight(c).update(dtype="F33"),
    "a dtype that is a list": lambda c: weight(c).update(dtype=[]),
    "an encoding of another dtype": lambda c: weight(c, "exp_avg").update(encoding="signed8"),
    "an encoding that is a list": lambda c: weight(c, "exp_avg").update(encoding=["bf16"]),
    "a master of no bf16 param": lambda c: weight(c, "exp_avg").update(encoding="split"),
    "states of whole numbers": lambda c: weight(c, "exp_avg").update(dtype="I32"),
    "random numbers of one rank more": lambda c: c["tensors"]["rng"].update({"7": c["tensors"]["rng"]["0"]}),
    "random numbers of no rank": lambda c: c["tensors"]["rng"].update(x=c["tensors"]["rng"].pop("0")),
    "gradients of no param": lambda c: c["tensors"].update(gradients={"none": {"reduced": weight(c)}}),
    "ranges that are a number": lambda c: weight(c).update(ranges=3),
    "a file that is a list": lambda c: weight(c)["ranges"][0].update(file=[]),
    "a file of two words": lambda c: c["files"].update({"rank-00000.safetensors": [1, 2]}),
    "a header larger than its file": lambda c: c["files"]["rank-00000.safetensors"].__setitem__(1, 1 << 50),
    "files that are a list": lambda c: c.update(files=[]),
    "no version": lambda c: c.pop("version"),
    "another version": lambda c: c.update(version=[2]),
    "no info": lambda c: c.pop("info"),
    "info that is a list": lambda c: c.update(info=[]),
    "a step in words": lambda c: c["info"].update(step="x"),
    "a step below zero": lambda c: c["info"].update(step=-5),
    "no world": lambda c: c["info"].pop("world"),
    "a world of none": lambda c: c["info"].update(world=0),
    "extra that is a list": lambda c: c["info"].update(extra=[1]),
    "extra that decodes to a tuple": lambda c: c["info"].update(extra={"$tuple": [1]}),
    "extra of a tensor that is not there": lambda c: c["info"].update(extra={"a": {"$tensor": "9"}}),
    "extra of a tensor that is no name": lambda c: c["info"].update(extra={"a": {"$tensor": {}}}),
    "a float that is a list": lambda c: c["info"].update(extra={"a": {"$float": []}}),
    "a float in other words": lambda c: c["info"].update(extra={"a": {"$float": "x"}}),
    "a tuple that is a number": lambda c: c["info"].update(extra={"a": [{"$tuple": 3}]}),
    "a dict that is a list": lambda c: c["info"].update(extra={"a": {"$dict": []}}),
    "items that are an object": lambda c: c["info"].update(extra={"a": {"$items": {"3": 4}}}),
    "items that are no pairs": lambda c: c["info"].update(extra={"a": {"$items": [[3]]}}),
    "items of an object": lambda c: c["info"].update(extra={"a": {"$items": [[{}, 4]]}}),
    "counts of a list": lambda c: c["info"].update(extra={"a": {"$counter": [[[], 4]]}}),
    "items of a tensor that is not there": lambda c: c["info"].update(extra={"a": {"$items": [[3, {"$tensor": "9"}]]}}),
    "extra without a bottom": lambda c: c["info"].update(extra={"a": deep(400)}),
    "module states that are a number": lambda c: c["info"].update(module_extra=1),
    "gradients that are a number": lambda c: c["info"].update(gradients=1),
    "params that are a list": lambda c: c.update(params=[]),
    "a param that is a list": lambda c: c["params"].update({"0.weight": []}),
    "a param without a tensor": lambda c: c["params"].update(more=about(c)),
    "a tensor without a param": lambda c: c["params"].pop("0.weight"),
    "aliases that are a number": lambda c: about(c).update(aliases=3),
    "aliases that are numbers": lambda c: about(c).update(aliases=[3]),
    "a param's step below zero": lambda c: about(c).update(step=-5),
    "a param's step in words": lambda c: about(c).update(step="x"),
    "a param's step is true": lambda c: about(c).update(step=True),
    "no has_state": lambda c: about(c).pop("has_state"),
    "has_state in words": lambda c: about(c).update(has_state="yes"),
    "carried that is a list": lambda c: about(c).update(carried=[]),
    "carried in words": lambda c: about(c).update(carried={"mu_product": "x"}),
    "carried as a number": lambda c: about(c).update(carried={"mu_product": 1.0}),
    "an optimizer that is not there": lambda c: about(c).update(optimizer=3),
    "an optimizer in words": lambda c: about(c).update(optimizer="0"),
    "a place that is a number": lambda c: about(c).update(place=3),
    "blocks that are a number": lambda c: about(c).update(shape=[64, 16], blocks=3),
    "blocks without a shape": lambda c: about(c).update(blocks=[[[0, 0], [64, 16]]]),
    "blocks that are one": lambda c: about(c).update(shape=[64, 16], blocks=[[[0, 0], [64, 16]]]),
    "blocks that leave a gap": lambda c: in_blocks(c, [[[0, 0], [32, 16]], [[33, 0], [31, 16]]]),
    "blocks that overlap": lambda c: in_blocks(c, [[[0, 0], [32, 16]], [[31, 0], [32, 16]]]),
    "blocks before the first element": lambda c: in_blocks(c, [[[-32, 0], [32, 16]], [[0, 0], [32, 16]]]),
    "blocks behind the last element": lambda c: in_blocks(c, [[[0, 0], [32, 16]], [[1 << 61, 0], [32, 16]]]),
    "blocks of other shapes than their tensors": in_blocks_of_another_shape,
    "a turn of one number": lambda c: about(c).update(turn=[0]),
    "optimizers that are a dict": lambda c: c.update(optimizers={}),
    "an optimizer that is a list": lambda c: c["optimizers"].__setitem__(0, []),
    "no rule": lambda c: c["optimizers"][0].pop("rule"),
    "groups that are a number": lambda c: c["optimizers"][0].update(groups=3),
    "a group that is a list": lambda c: c["optimizers"][0].update(groups=[[]]),
    "params of a group that are not there": lambda c: group(c)["params"].append("more"),
    "a param in no group": lambda c: group(c)["params"].remove("0.weight"),
    "values that are a list": lambda c: group(c).update(values=[]),
    "values of a tensor that is not there": lambda c: group(c)["values"].update(fused={"$tensor": "9"}),
    "values that replace params": lambda c: group(c)["values"].update(params=[]),
}

# What only the model's optimizer and modules can tell.
LOADS: dict[str, Forge] = {
    "a rate in words": lambda c: group(c)["values"].update(lr="x"),
    "a rate that is a dict": lambda c: group(c)["values"].update(lr={"a": 1}),
    "a rate of many elements": lambda c: group(c)["values"].update(lr={"$tensor": "0"}),
    "betas without an answer": lambda c: group(c)["values"].update(betas={"$tuple": [2, 2]}),
    "betas of one number": lambda c: group(c)["values"].update(betas={"$tuple": [0.9]}),
    "a decay that is a list": lambda c: group(c)["values"].update(weight_decay=[1]),
    "a flag in words": lambda c: group(c)["values"].update(maximize="no"),
    "a flag that is missing": lambda c: group(c)["values"].pop("amsgrad"),
    "a flag that is refused": lambda c: group(c)["values"].update(capturable=True),
    "carried of another rule": lambda c: about(c).update(carried={"mu_product": (1.0).hex()}),
    "a module that is not there": lambda c: c["info"]["module_extra"].update(more=1),
    "a module that takes no state": lambda c: c["info"]["module_extra"].update({"2": 1}),
    "another shape": lambda c: weight(c).update(shape=[1024], strides=[1]),
    "random numbers that are none": lambda c: c["tensors"]["rng"]["0"].update(
        torch=c["tensors"]["rng"]["0"]["numpy"], numpy=c["tensors"]["rng"]["0"]["torch"]
    ),
    "random numbers of another generator": lambda c: c["tensors"]["rng"]["0"].update(
        numpy=c["tensors"]["rng"]["0"]["python"], python=c["tensors"]["rng"]["0"]["numpy"]
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    extra = {"t": torch.arange(3), "f": float("inf"), "u": (1, (2,)), "$d": {"$tuple": 1}, "i": {3: (4,)}}
    return save(tmp_path, *built(0), extra=extra)


def refused(path: Path, cases: dict[str, Forge], is_seen_without_a_model: bool) -> None:
    good = (path / "manifest.json").read_bytes()
    model, optimizer = built(1)
    before, calls, state = facts(model, optimizer), model[0].calls, torch.get_rng_state()
    for name, change in cases.items():
        forged(path, change)
        problem: BaseException | None = None
        try:
            shardopt.load_checkpoint(path, model, optimizer)
        except Exception as error:
            problem = error
        assert isinstance(problem, CheckpointError), (name, problem)
        assert any(word in str(problem) for word in ("othing was loaded", "ot written by shardopt", "do not make up",
                                                     "format version")), (name, problem)  # fmt: skip
        if is_seen_without_a_model:
            assert verify(path), name
            with raises(CheckpointError, str(problem)):  # in the same words
                list(describe(path))
        (path / "manifest.json").write_bytes(good)
    assert facts(model, optimizer) == before and model[0].calls == calls
    assert torch.equal(torch.get_rng_state(), state)
    # And the one that was saved loads, in the same optimizer.
    loaded = shardopt.load_checkpoint(path, model, optimizer)
    assert loaded["u"] == (1, (2,)) and loaded["$d"] == {"$tuple": 1} and loaded["i"] == {3: (4,)}
    assert model[0].calls == 2
    assert facts(model, optimizer) != before
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()


def test_what_no_manifest_says_is_refused(saved: Path) -> None:
    refused(saved, SAYS, True)


def test_what_no_optimizer_can_use_is_refused(saved: Path) -> None:
    refused(saved, LOADS, False)


def test_json_that_python_cannot_bear_is_refused(saved: Path) -> None:
    model, optimizer = built(1)
    before = facts(model, optimizer)
    text = json.dumps(json.loads((saved / "manifest.json").read_bytes())["manifest"])
    for wrong in (
        text.replace('"step": 2', f'"step": {"[" * 100_000}{"]" * 100_000}', 1),
        text.replace('"step": 2', f'"step": {"9" * 5000}', 1),
        text.replace('"lr": 0.1', '"lr": NaN', 1),
        text.replace('"lr": 0.1', '"lr": Infinity', 1),
        text[:-1],
        "[]",
        "3",
        "",
    ):
        assert wrong != text
        write(saved, wrong)
        with raises(CheckpointError, "not a manifest that shardopt wrote", "Nothing was loaded"):
            shardopt.load_checkpoint(saved, model, optimizer)
        assert verify(saved)
    assert facts(model, optimizer) == before


def test_carried_scalars_and_short_formats_are_checked_too(tmp_path: Path) -> None:
    path = save(tmp_path / "carried", *built(0, ShardedNAdam))
    forged(path, lambda c: about(c).update(carried={}))
    with raises(CheckpointError, "needs the states", "mu_product", "Nothing was loaded"):
        shardopt.load_checkpoint(path, *built(1, ShardedNAdam))
    short = {"state_format": "int8", "tuning": shardopt.Tuning(compress_from=1)}
    path = save(tmp_path / "short", *built(0, **short))
    good = (path / "manifest.json").read_bytes()
    scales, states = (
        "an fp32 scale for each block belongs",
        "exp_avg = torch.uint8, where floating point numbers belong",
    )
    changes: list[tuple[Forge, str]] = [
        (lambda c: c["tensors"]["params"]["0.weight"].pop("exp_avg.scales"), scales),
        (lambda c: weight(c, "exp_avg.scales").update(dtype="I32"), scales),
        (lambda c: weight(c, "exp_avg.scales").update(shape=[2, 2], strides=[2, 1]), scales),
        (
            lambda c: weight(c, "exp_avg").update(encoding="nothing"),
            "encoding = 'nothing', where a known encoding belongs",
        ),
        (lambda c: weight(c, "exp_avg").pop("encoding"), states),
    ]
    model, optimizer = built(1, **short)
    before = facts(model, optimizer)
    for change, told in changes:
        forged(path, change)
        with raises(CheckpointError, told):
            shardopt.load_checkpoint(path, model, optimizer)
        (path / "manifest.json").write_bytes(good)
    assert facts(model, optimizer) == before
    assert shardopt.load_checkpoint(path, model, optimizer).step == 2


def test_dense_strides_in_any_order() -> None:
    for tensor in (torch.zeros(3, 4, 5), torch.zeros(()), torch.zeros(1, 7), torch.zeros(0, 3)):
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            each = tensor.permute(order) if tensor.dim() == 3 else tensor
            assert is_dense(each.shape, each.stride()) or 0 in each.shape
    assert not is_dense((3, 4), (1, 4)) and not is_dense((3, 4), (0, 1)) and is_dense((1, 4), (99, 1))


def test_what_holds_itself_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = built(0)
    endless: dict[str, Any] = {}
    endless["again"] = endless
    for extra in ({"a": endless}, {"a": deep(5000)}, {"a": deep(MOST_LEVELS)}):
        with raises(CheckpointError, "nests more than", "Nothing was saved"):
            save(tmp_path, model, optimizer, extra=extra)
    path = save(tmp_path, model, optimizer, extra={"a": deep(MOST_LEVELS - 1)})
    assert shardopt.load_checkpoint(path, *built(1))["a"] == deep(MOST_LEVELS - 1)
    assert len(draws()) == 3
