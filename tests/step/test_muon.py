"""Muon: the bits of torch's on whole matrices, at every number of ranks, stage and tier; each is made whole once."""

import copy
import inspect
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from shardopt import (
    CheckpointError,
    Offload,
    RuleError,
    ShardedAdamW,
    ShardedMuon,
    ShardedOptimizer,
    ShardoptError,
    StateError,
    Tuning,
    load_checkpoint,
    matrix_rule,
    rule,
    save_checkpoint,
)
from shardopt.rules import Value
from shardopt.rules import muon as muon_rules
from tests.support import comparing
from tests.support.offloaded import on_a_gpu
from tests.support.ranks import Pool
from tests.support.training import one_thread, raises
from tests.support.wire import counting

SHAPES = [(40, 24), (7, 300), (64, 64), (1, 5), (33, 65), (130, 17), (3, 2)]
STEPS = 3
DEFAULTS: dict[str, Any] = {"lr": 0.02}
OTHER: dict[str, Any] = {"momentum": 0.3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}


class Matrices(nn.Module):
    """Matrices whose gradients are given numbers: the loss is linear in them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in shapes]
        weights[0] = weights[0].T.contiguous().T  # columns lie together
        self.blocks = nn.ModuleList(map(Block, weights))

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        terms = [block(each) for block, each in zip(self.blocks, coefficients, strict=True)]
        return torch.stack(terms).sum()


class Block(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Parameter(weight)

    def forward(self, coefficients: Tensor) -> Tensor:
        return (self.weight * coefficients).sum()


def gradients(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """The same on every rank, of so few bits that their sum over three ranks is exact."""
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


def of_torch(keywords: dict[str, Any]) -> list[bytes]:
    """Params and momenta after torch's training."""
    params = list(Matrices().parameters())
    optimizer = torch.optim.Muon(params, **keywords)
    with one_thread():
        for step in range(STEPS):
            for param, grad in zip(params, gradients(step), strict=True):
                param.grad = torch.empty_like(param).copy_(grad)  # in the param's order, as autograd does
            optimizer.step()
    return raw([*params, *(optimizer.state[param]["momentum_buffer"] for param in params)])


def raw(tensors: Sequence[Any]) -> list[bytes]:
    return [comparing.raw(each) for each in tensors]


def of_ours(keywords: dict[str, Any], takes_module: bool) -> list[bytes]:
    """The same of a sharded training, with the module or with averaged gradients."""
    module = Matrices()
    params = list(module.parameters())
    groups = [{"params": params, "rule": "muon"}] if takes_module else params
    options = {"module": module, **keywords} if takes_module else keywords
    optimizer = ShardedMuon(groups, **options)
    with one_thread():
        for step in range(STEPS):
            optimizer.zero_grad()
            if takes_module:
                module(gradients(step)).backward()
            else:
                for param, grad in zip(params, gradients(step), strict=True):
                    param.grad = grad
            optimizer.step()
    with optimizer.unsharded():
        found = raw(params)
    optimizer.consolidate_state_dict()
    states = optimizer.state_dict()["state"]
    found += raw([states[index]["momentum_buffer"] for index in range(len(params))])
    optimizer.close()
    return found


def run_settings(settings: Sequence[tuple[dict[str, Any], bool]]) -> list[list[bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        places = {"disk": {"offload": folder}}
        return [of_ours({**each, **places.get(each.get("offload", ""), {})}, takes) for each, takes in settings]


SMALL = Tuning(bucket_bytes=8192)
# By number of ranks: keywords, and whether the module is handed over.
SETTINGS: dict[int, list[tuple[dict[str, Any], bool]]] = {
    1: [({"stage": 1}, False), ({"stage": 3, "tuning": Tuning(keep_below=0)}, True)],
    2: [
        ({"stage": 0}, True),
        ({"stage": 1, "tuning": SMALL}, False),
        ({"stage": 2, "tuning": Tuning(neighbours=False, overlap_gather=True)}, True),
        ({"stage": 3, "offload": "cpu", "tuning": Tuning(keep_below=0)}, True),
    ],
    3: [
        ({"stage": 1, "offload": "cpu"}, True),
        ({"stage": 2, "tuning": SMALL, "offload": "disk"}, True),
        ({"stage": 3}, True),
    ],
}


@pytest.mark.parametrize("world", SETTINGS)
def test_bits_of_torch(ranks: Pool, world: int) -> None:
    keywords = OTHER if world == 3 else DEFAULTS
    expected = of_torch(keywords)
    settings = [({**keywords, **options}, takes_module) for options, takes_module in SETTINGS[world]]
    for rank, runs in enumerate(ranks.run(run_settings, settings, world=world)):
        for (options, _), found in zip(settings, runs, strict=True):
            # momenta are consolidated on rank 0
            count = len(SHAPES)
            assert found[:count] == expected[:count], (rank, options)
            if rank == 0:
                assert found == expected, options


def clipped(mesh: tuple[int, ...]) -> list[bytes]:
    """Params after steps with a loss scale and a clipped norm, on a mesh of (replicate, shard)."""
    module = Matrices()
    group = init_device_mesh("cpu", mesh) if mesh else None
    stage = {"stage": 2, "process_group": group} if mesh else {"stage": 1}
    optimizer = ShardedMuon(
        [{"params": module.parameters(), "rule": "muon"}], module=module, max_grad_norm=0.5, **stage
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with one_thread():
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(module(gradients(step))).backward()
            scaler.step(optimizer)
            scaler.update()
    found = raw(list(module.parameters()))
    optimizer.close()
    return found


def test_bits_on_a_mesh_with_a_scaler_and_clipping(ranks: Pool) -> None:
    expected = clipped(())
    assert expected != of_torch({})[: len(SHAPES)]
    assert ranks.run(clipped, (2, 2), world=4) == [expected] * 4


# -- tiers and formats -------------------------------------------------------------------------------------------------


def rested(offload: Any, dtype: torch.dtype, **keywords: Any) -> list[bytes]:
    """Params and states of one rank, several chunks a param, after more steps than a choice between devices takes."""
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in ((130, 17), (7, 300))]
    others = [Parameter(torch.linspace(0, 1, 300).to(dtype))]
    groups = [{"params": params}, {"params": others, "rule": "adamw"}]
    tuning = Tuning(chunk_bytes=4096, bucket_bytes=6000, compress_from=256)
    optimizer = ShardedMuon(groups, lr=0.02, offload=offload, tuning=tuning, **keywords)
    with one_thread():
        for step in range(8):
            for index, param in enumerate([*params, *others]):
                if (step + index) % 4 != 3:  # else it has no gradient
                    param.grad = torch.sin(torch.arange(param.numel()) * (step + 1.3)).view(param.shape).to(dtype)
                else:
                    param.grad = None
            optimizer.step()
    found = raw([*params, *others])
    found += raw([value for param in params for value in optimizer.state[param].values() if torch.is_tensor(value)])
    optimizer.close()
    return found


FORMATS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {"master": "split", "state_format": "int8", "ema": 0.9}),
    (torch.bfloat16, {"master": "none", "state_format": "bf16"}),
    (torch.bfloat16, {}),
]


@pytest.mark.parametrize(("dtype", "formats"), FORMATS[:3], ids=str)
def test_tiers_leave_the_same_bits(dtype: torch.dtype, formats: dict[str, Any], tmp_path: Path) -> None:
    ends = {}
    for name, offload in {"still": None, "gpu": Offload(step="gpu"), "auto": Offload(), "disk": str(tmp_path)}.items():
        torch.manual_seed(0)
        with nullcontext() if offload is None else on_a_gpu():
            ends[name] = rested(offload, dtype, **formats)
    assert all(found == ends["still"] for found in ends.values()), [
        name for name in ends if ends[name] != ends["still"]
    ]


# -- with AdamW in one optimizer ---------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 24)
        self.qkv = nn.Linear(24, 72)
        self.norm = nn.LayerNorm(24)
        self.experts = nn.Parameter(torch.randn(2, 24, 16) / 5)
        self.down = nn.Linear(16, 24, bias=False)
        self.lm_head = nn.Linear(24, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        hidden = torch.stack([(q * k + v) @ each for each in self.experts]).sum(0)
        return self.lm_head(x + self.down(hidden))


MATRICES = ("qkv.weight", "experts", "down.weight")


def mixed_groups(model: Model) -> list[dict[str, Any]]:
    """What the defaults part, but for a fused weight and a stack."""
    rest = [param for name, param in model.named_parameters() if name not in MATRICES[:2]]
    return [
        {"params": [model.qkv.weight], "rule": "muon", "matrices": 3},
        {"params": [model.experts], "rule": "muon", "matrices": "stack"},
        {"params": rest},
    ]


def mixed(model: Model, **options: Any) -> ShardedMuon:
    return ShardedMuon(mixed_groups(model), lr=0.02, adamw={"lr": 3e-3}, module=model, **options)


def mixed_step(model: Model, step: int) -> None:
    """Backward, with the same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randint(0, 50, (4, 8), generator=generator)).square().mean().backward()


def mixed_reference(steps: int, adamw: Any = ShardedAdamW) -> list[bytes]:
    """Torch's Muon on each matrix by itself, and AdamW on all other params."""
    model = Model()
    named = dict(model.named_parameters())
    parts = {
        "qkv.weight": model.qkv.weight.chunk(3),
        "experts": list(model.experts),
        "down.weight": [model.down.weight],
    }
    alone = {name: [Parameter(each.detach().clone()) for each in its] for name, its in parts.items()}
    hidden = torch.optim.Muon([each for its in alone.values() for each in its], lr=0.02)
    others = adamw([param for name, param in named.items() if name not in MATRICES], lr=3e-3)
    with one_thread():
        for step in range(steps):
            model.zero_grad()
            mixed_step(model, step)
            for name, its in alone.items():
                for each, grad in zip(its, cut(named[name].grad, len(its)), strict=True):
                    each.grad = grad.clone()
            hidden.step()
            others.step()
            for name, its in alone.items():
                with torch.no_grad():
                    named[name].copy_(torch.cat([*its]).view_as(named[name]))
    return raw(list(model.parameters()))


def cut(whole: Tensor | None, count: int) -> Sequence[Tensor]:
    assert whole is not None
    return list(whole) if whole.ndim == 3 else whole.chunk(count)


def train_mixed(steps: range, options: dict[str, Any], load: str = "", save: str = "") -> list[bytes]:
    model = Model()
    optimizer = mixed(model, **options)
    if load:
        load_checkpoint(load, model, optimizer)
    with one_thread():
        for step in steps:
            optimizer.zero_grad()
            mixed_step(model, step)
            optimizer.step()
    if save:
        save_checkpoint(save, model, optimizer)
    with optimizer.unsharded():
        found = raw(list(model.parameters()))
    optimizer.close()
    return found


def test_a_checkpoint_of_muon_and_adamw_at_another_world(ranks: Pool, tmp_path: Path) -> None:
    """Two ranks, then four; each step is that of torch's Muon on every matrix, and of AdamW on all other params."""
    first = ranks.run(
        train_mixed, range(2), {"stage": 3, "tuning": Tuning(keep_below=0)}, "", str(tmp_path / "saved"), world=2
    )
    assert first == [mixed_reference(2)] * 2
    rest = ranks.run(train_mixed, range(2, 4), {"stage": 2}, str(tmp_path / "saved"), world=4)
    assert rest == [mixed_reference(4)] * 4


def test_a_fused_weight_whose_columns_lie_together() -> None:
    whole = Parameter(torch.randn(24, 36).T)
    halves = [Parameter(each.detach().T.contiguous().T) for each in whole.chunk(2)]
    ours, theirs = ShardedMuon([{"params": [whole], "matrices": 2}]), torch.optim.Muon(halves)
    with one_thread():
        for step in range(2):
            whole.grad = torch.sin(torch.arange(864.0) * (step + 1)).view(24, 36).T
            for half, grad in zip(halves, whole.grad.chunk(2), strict=True):
                half.grad = grad.T.contiguous().T
            ours.step()
            theirs.step()
    assert raw([whole]) == raw([torch.cat([*halves])])


class Tailed(nn.Module):
    """As models of Hugging Face are; neither name nor size tells what the last layer is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.tail = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.tail


def test_which_param_took_which() -> None:
    optimizer = ShardedMuon(Model(), lr=0.5, weight_decay=0.3, adamw={"betas": (0.8, 0.9)})
    muon, adamw = optimizer.param_groups
    assert [group["rule"] for group in (muon, adamw)] == ["muon", "adamw"]
    assert (muon["lr"], muon["weight_decay"]) == (0.5, 0.3)
    assert (adamw["lr"], adamw["weight_decay"], adamw["betas"]) == (1e-3, 1e-2, (0.8, 0.9))  # never Muon's
    shown = repr(optimizer)
    assert "muon: qkv.weight, down.weight" in shown
    assert "adamw: experts, embed.weight, qkv.bias, norm.weight, norm.bias, lm_head.weight" in shown
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))  # without an embedding: the last one
    assert [len(group["params"]) for group in ShardedMuon(plain).param_groups] == [2, 4]
    tailed = Tailed()  # the last one says itself that it is a head
    muon, adamw = ShardedMuon(tailed).param_groups
    assert muon["params"] == [tailed.up.weight] and tailed.tail.weight in set(adamw["params"])


# -- what travels, what fails ------------------------------------------------------------------------------------------


def traffic(tuning: Tuning) -> tuple[dict[str, int], list[int]]:
    """Bytes received in one step by this rank; numbers of the matrices that it made whole."""
    module, made = Matrices(), []

    @matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.apply)
    def counted(update: Tensor, group: Any) -> Tensor:
        made.append([tuple(each.shape) for each in module.parameters()].index(tuple(update.shape)))
        return update

    defaults = ShardedMuon([torch.zeros(1, 1)]).defaults
    optimizer = ShardedOptimizer(module, defaults, rule=counted, stage=2, tuning=tuning)
    module(gradients(0)).backward()
    optimizer.step()
    return optimizer.engine.traffic(), made


def test_each_matrix_is_made_whole_once(ranks: Pool) -> None:
    for world in (2, 3):
        found = ranks.run(traffic, Tuning(bucket_bytes=1), world=world)  # a bucket has one matrix, which is cut
        assert sorted(number for _, made in found for number in made) == list(range(len(SHAPES)))
        elements = sum(rows * columns for rows, columns in SHAPES)
        assert 0 < sum(bytes["matrices"] for bytes, _ in found) <= 4 * (world - 1) / world * elements


class Owner(nn.Module):
    """Matrices of one module: those of one unit at stage 3."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        for number, block in enumerate(Matrices(shapes).blocks):
            self.register_parameter(f"weight{number}", block.weight)

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        return torch.stack(
            [(each * own).sum() for each, own in zip(self.parameters(), coefficients, strict=True)]
        ).sum()


PACKED = [(128, 128), (128, 128), (256, 128), (128, 256)]  # on two ranks: a large and a small one each
PADDED = [(9, 256), (22, 256), (11, 256)]  # the second alone, and the others with two blocks of padding
CUT = [(128, 128)] * 3  # a third more, were each on one of two ranks


def beside_ddp(shapes: Sequence[tuple[int, ...]], stage: int) -> tuple[list[int], list[list[bytes]], int, str]:
    """Of torch's Muon on DDP and of ours: bytes of the last step, params; of ours what slices moved, and its repr."""
    moves, params = [], []
    for is_ours in (False, True):
        module = Owner(shapes)
        keywords: dict[str, Any] = {"stage": stage, "module": module, "tuning": Tuning(keep_below=0)}
        hidden = [{"params": module.parameters(), "rule": "muon"}]
        trained = module if is_ours else nn.parallel.DistributedDataParallel(module)
        kind: Any = ShardedMuon if is_ours else torch.optim.Muon
        optimizer = kind(hidden if is_ours else module.parameters(), lr=0.02, **(keywords if is_ours else {}))
        with one_thread():
            for step in range(STEPS):
                with counting() as moved:
                    optimizer.zero_grad()
                    trained(gradients(step, shapes)).backward()
                    optimizer.step()
        moves.append(moved.received)
        with optimizer.unsharded() if is_ours else nullcontext():
            params.append(raw(list(module.parameters())))
    return moves, params, optimizer.engine.traffic()["matrices"], repr(optimizer)


def test_nothing_travels_of_matrices_that_lie_whole(ranks: Pool) -> None:
    """As many bytes as DDP moves, and its bits; where whole matrices would be padded too much, slices travel."""
    for shapes, stage, words in (
        (PACKED, 2, "whole on one rank: 4 of 4 (padding 0.0%)"),
        (PACKED, 3, "whole on one rank: 4 of 4 (padding 0.0%)"),
        (PADDED, 2, "whole on one rank: 3 of 3 (padding 4.8%)"),
        (CUT, 2, "whole on one rank: 2 of 3 (padding 0.0%)"),
    ):
        found = ranks.run(beside_ddp, shapes, stage, world=2)
        for (ddp, ours), (theirs, params), _, shown in found:
            assert params == theirs and words in shown, (stage, shown)
            assert stage == 3 or shapes is PADDED or (ours == pytest.approx(ddp, rel=0.01)) is (shapes is PACKED), (
                ours,
                ddp,
            )
        assert (sum(slices for _, _, slices, _ in found) > 0) is (shapes is CUT)


def fail_on_one(neighbours: bool) -> str:
    module = Matrices()

    @matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.apply)
    def failing(update: Tensor, group: Any) -> Tensor:
        if dist.get_rank() == 1 and optimizer.updates == 1:
            raise ArithmeticError("no such root")
        return update

    tuning = Tuning(neighbours=neighbours)
    defaults = ShardedMuon([torch.zeros(1, 1)]).defaults
    optimizer = ShardedOptimizer(module, defaults, rule=failing, tuning=tuning)
    said = []
    for step in range(3):
        try:
            optimizer.zero_grad()
            module(gradients(step)).backward()
            optimizer.step()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return "\n".join(said)


@pytest.mark.parametrize("neighbours", [True, False])
def test_a_function_that_fails_on_one_rank(ranks: Pool, neighbours: bool) -> None:
    """The other ranks hear of it, and wait for nothing."""
    other, own = ranks.run(fail_on_one, neighbours, world=2)
    assert "ArithmeticError: no such root" in own
    assert "DisagreementError" in other and "rank 1" in other
    for said in (own, other):
        assert "an earlier step failed half-way" in said.split("\n")[-1]


# -- in place of torch's -----------------------------------------------------------------------------------------------


def test_arguments_and_state_dicts_are_torchs() -> None:
    theirs, ours = (dict(inspect.signature(each).parameters) for each in (torch.optim.Muon, ShardedMuon))
    assert [ours.pop(name).kind.name for name in ("options", "adamw")] == ["VAR_KEYWORD", "KEYWORD_ONLY"]
    assert [(each.name, each.default, each.kind) for each in ours.values()] == [
        (each.name, each.default, each.kind) for each in theirs.values()
    ]
    params = [[Parameter(torch.linspace(-1, 1, 24).view(6, 4))] for _ in range(3)]
    optimizers = [torch.optim.Muon(params[0]), ShardedMuon(params[1]), torch.optim.Muon(params[2])]
    assert optimizers[1].defaults == optimizers[0].defaults
    for step in range(3):
        for each in params:
            each[0].grad = torch.sin(torch.arange(24.0) * (step + 1)).view(6, 4)
        optimizers[step].step()  # each one step, and the next goes on
        if step < 2:
            params[step + 1][0].data.copy_(params[step][0].data)
            optimizers[step + 1].load_state_dict(copy.deepcopy(optimizers[step].state_dict()))
    alone = [Parameter(torch.linspace(-1, 1, 24).view(6, 4))]
    reference = torch.optim.Muon(alone)
    for step in range(3):
        alone[0].grad = torch.sin(torch.arange(24.0) * (step + 1)).view(6, 4)
        reference.step()
    assert raw(alone) == raw(params[2])
    assert set(optimizers[1].state_dict()["state"][0]) == {"momentum_buffer"}
    assert optimizers[2].state_dict()["param_groups"] == reference.state_dict()["param_groups"]


def test_a_group_that_was_written_to_is_looked_at_before_anything_changes() -> None:
    weight = Parameter(torch.ones(3, 2))
    optimizer = ShardedMuon([{"params": [weight], "matrices": 3}])
    weight.grad = torch.ones(3, 2)
    optimizer.load_state_dict(torch.optim.Muon([weight]).state_dict())
    (group,) = optimizer.param_groups
    assert group["matrices"] == 3  # of which torch knows nothing
    for wrong in ({"ns_coefficients": (1.0, 2.0)}, {"ns_steps": 200}, {"matrices": 2}):
        before = dict(group)
        group |= wrong
        with raises((ShardoptError, ValueError), *wrong):
            optimizer.step()
        group |= before
        assert not optimizer.state and raw([weight]) == raw([torch.ones(3, 2)])
    optimizer.step()


def test_the_rule_of_a_bound_param_stays() -> None:
    """Half of a bucket by AdamW would write fp32 params where Muon's updates in bf16 lie."""
    weights = [Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = ShardedMuon([{"params": [each], "rule": "muon"} for each in weights])
    for each in weights:
        each.grad = torch.eye(4)
    optimizer.step()
    before = raw(weights)
    of_adamw = ShardedMuon([{"params": [torch.ones(4, 4)], "rule": "adamw"}]).param_groups[0]
    optimizer.param_groups[0] |= {**of_adamw, "params": [weights[0]]}
    with raises(ShardoptError, "construct the optimizer anew", "rule='adamw'"):
        optimizer.step()
    assert raw(weights) == before
    optimizer.param_groups[0]["rule"] = "muon"
    optimizer.step()


def of_rules(*words: str) -> tuple[nn.Module, ShardedMuon]:
    """A matrix for each rule, after a step."""
    module = Matrices([(4, 4)] * len(words))
    groups = [{"params": [each], "rule": word} for each, word in zip(module.parameters(), words, strict=True)]
    optimizer = ShardedMuon(groups, module=module)
    module(gradients(0, [(4, 4)] * len(words))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def test_states_of_swapped_rules_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    module, saved = of_rules("muon", "adamw")
    save_checkpoint(tmp_path, module, saved)
    other, optimizer = of_rules("adamw", "muon")

    before = comparing.held(optimizer), repr(optimizer.param_groups)
    with raises(StateError, "group 0 of the dict takes the rule 'muon', here it takes 'adamw'"):
        optimizer.load_state_dict(saved.state_dict())
    with raises(CheckpointError, "group 0 of optimizer 0 takes the rule 'muon' in the checkpoint, here 'adamw'"):
        load_checkpoint(tmp_path, other, optimizer)
    forged = copy.deepcopy(optimizer.state_dict())
    forged["param_groups"][1]["rule"] = "sgd"
    with raises(StateError, "group 1 of the dict takes the rule 'sgd', here it takes 'muon'"):
        optimizer.load_state_dict(forged)
    assert (comparing.held(optimizer), repr(optimizer.param_groups)) == before
    assert len(load_checkpoint(tmp_path, other, optimizer, strict=False).mismatches) == 4  # two params, two groups
    assert raw(list(other.parameters())) == raw(list(module.parameters()))
    other(gradients(1, [(4, 4)] * 2)).backward()
    optimizer.step()  # with the rules that it has
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw", "muon"]


def test_a_group_that_is_parted_is_added_whole_or_not_at_all() -> None:
    optimizer = ShardedMuon(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for wrong, words in ((torch.zeros(2, dtype=torch.complex64), "complex params"), (nn.Linear(2, 2), "only optimize")):
        with raises(TypeError, words):
            optimizer.add_param_group({"params": [torch.zeros(4, 2), wrong]})
        assert len(optimizer.param_groups) == 2
    for no_group in ([torch.zeros(4, 2)], {"lr": 0.1}, None):
        with raises(TypeError, "param_group must be a dict with 'params', found"):
            optimizer.add_param_group(no_group)  # type: ignore[arg-type]
        assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"params": [torch.zeros(3)]}, ValueError, "Muon only supports 2D parameters whereas we found a parameter"),
        ({"ns_steps": 100}, ValueError, "Number of steps must be less than 100 for computational efficiency"),
        ({"ns_coefficients": (1.0, 2.0)}, TypeError, "ns_coefficients takes 3 numbers"),
        ({"adjust_lr_fn": "more"}, ValueError, "Adjust learning rate function more is not supported"),
        ({"adamw": {"lrr": 1.0}}, TypeError, "adamw takes arguments of torch.optim.AdamW"),
        ({"adamw": {"lr": -1.0}}, ValueError, "Invalid learning rate: -1.0"),
        ({"adamw": {"lr": "fast"}}, TypeError, "lr must be a number, found 'fast'"),
        ({"params": [{"params": [torch.zeros(2)], "rule": "adamw", "lr": "fast"}]}, TypeError, "lr must be a number"),
        ({"params": [{"params": [torch.zeros(4, 2)], "matrices": 3}]}, ValueError, "matrices=3 takes 2D params whose"),
        ({"params": [{"params": [torch.zeros(4, 2)], "matrices": "stack"}]}, ValueError, "takes 3D params"),
        ({"params": [{"params": [torch.zeros(4, 2)], "rule": "sgd"}]}, RuleError, "['muon', 'adamw']"),
        ({"params": [{"params": [torch.zeros(2)], "rule": "adamw", "betas": (2, 0)}]}, ValueError, "Invalid beta"),
        ({"params": nn.Linear(2, 2), "release_gradients": True}, ShardoptError, "omit release_gradients"),
    ],
    ids=str,
)
def test_wrong_use_is_refused(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with raises(kind, words):
        ShardedMuon(**{"params": [torch.zeros(4, 2)], **arguments})
    optimizer = ShardedMuon([torch.zeros(4, 2)])
    if isinstance(arguments.get("params"), list):
        with raises(kind, words):
            optimizer.add_param_group({"params": arguments["params"]} | _group(arguments["params"][0]))
        assert len(optimizer.param_groups) == 1


def _group(first: Any) -> dict[str, Any]:
    return first if isinstance(first, dict) else {}


def test_a_pass_that_cannot_be() -> None:
    @rule(scalars=muon_rules.muon_scalars)
    def reads_the_param(param: Value, grad: Value, state: Value, s: Value) -> Value:
        return grad + s.decay * param

    with raises(RuleError, "reads_the_param", "no param"):
        matrix_rule(accumulate=reads_the_param, apply=muon_rules.apply)
    with raises(RuleError, "momentum_buffer"):
        matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.accumulate)
    with raises(RuleError, "two arguments, (update, group)", "first step"):
        matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.apply)(lambda update: update)


@pytest.mark.parametrize(("made", "found"), [(lambda update: update[1:], "(39, 24)"), (lambda update: 1.0, "float")])
def test_a_function_returns_a_tensor_of_the_shape_of_the_update(made: Any, found: str) -> None:
    @matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.apply)
    def reshaping(update: Tensor, group: Any) -> Any:
        return made(update)

    defaults = ShardedMuon([torch.zeros(1, 1)]).defaults
    weight = Parameter(torch.ones(40, 24))
    optimizer = ShardedOptimizer([weight], defaults, rule=reshaping)
    weight.grad = torch.ones(40, 24)
    with raises(RuleError, "return a tensor of shape (40, 24)", "'reshaping'", f"it returned {found} for param 0"):
        optimizer.step()
    assert raw([weight]) == raw([torch.ones(40, 24)])
