"""Muon on weights that hold matrices of unequal rows, as a fused qkv of grouped-query attention does."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shardopt import ShardedMuon, ShardoptError, Tuning, load_checkpoint, matrix_rule, save_checkpoint
from shardopt.domain.bucket_plan import matrix_stats, plan_buckets
from shardopt.optim.optimizer import ShardedOptimizer
from shardopt.partition.matrix_plan import cost_of
from shardopt.rules import muon as muon_rules
from shardopt.rules import rule
from shardopt.rules.matrix import matrices_of
from shardopt.rules.muon import muon
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import one_thread, raises

# Shape, and the rows of each matrix. Of the first all matrices take one step size; of the others, two and three.
WEIGHTS: list[tuple[tuple[int, int], Any]] = [
    ((48, 64), (32, 8, 8)),
    ((48, 16), (32, 8, 8)),
    ((120, 8), [64, 32, 24]),
    ((24, 40), None),
    ((48, 16), 3),
]
KEYWORDS: list[dict[str, Any]] = [{"lr": 0.02}, {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape, _ in WEIGHTS]
        self.layers = nn.ModuleList(map(Layer, weights))

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        return torch.stack([layer(each) for layer, each in zip(self.layers, coefficients, strict=True)]).sum()


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Parameter(weight)

    def forward(self, coefficients: Tensor) -> Tensor:
        return (self.weight * coefficients).sum()


def gradients(step: int) -> list[Tensor]:
    """The same on every rank, of so few bits that their sum over three ranks is exact."""
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape, _ in WEIGHTS]


def cut(weight: Tensor, matrices: Any) -> list[Tensor]:
    return list(weight.split([rows for rows, _ in matrices_of(weight.shape, matrices)]))


def of_torch(keywords: dict[str, Any], steps: int) -> list[bytes]:
    """Params after training each matrix by itself with torch."""
    parts = [
        [Parameter(each.detach().clone()) for each in cut(weight, matrices)]
        for weight, (_, matrices) in zip(Weights().parameters(), WEIGHTS, strict=True)
    ]
    optimizer = torch.optim.Muon([each for its in parts for each in its], **keywords)
    with one_thread():
        for step in range(steps):
            for its, grad, (_, matrices) in zip(parts, gradients(step), WEIGHTS, strict=True):
                for each, own in zip(its, cut(grad, matrices), strict=True):
                    each.grad = own.clone()
            optimizer.step()
    return [raw(torch.cat(list(its))) for its in parts]


def of_ours(keywords: dict[str, Any], steps: range, load: str = "", save: str = "") -> list[bytes]:
    module = Weights()
    groups = [
        {"params": [param], "rule": "muon", **({} if matrices is None else {"matrices": matrices})}
        for param, (_, matrices) in zip(module.parameters(), WEIGHTS, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        places = {"offload": folder} if keywords.get("offload") == "disk" else {}
        optimizer = ShardedMuon(groups, module=module, **{**keywords, **places})
        if load:
            load_checkpoint(load, module, optimizer)
        with one_thread():
            for step in steps:
                optimizer.zero_grad()
                module(gradients(step)).backward()
                optimizer.step()
        if save:
            save_checkpoint(save, module, optimizer)
        with optimizer.unsharded():
            found = [raw(param) for param in module.parameters()]
        optimizer.close()
    return found


CHUNKED = Tuning(chunk_bytes=4096, bucket_bytes=6000, keep_below=0)
SETTINGS: dict[int, list[dict[str, Any]]] = {
    1: [{"stage": 1}, {"stage": 1, "offload": "cpu", "tuning": CHUNKED}],
    2: [{"stage": 0}, {"stage": 2, "offload": "disk", "tuning": CHUNKED}],
    3: [{"stage": 1, "tuning": CHUNKED}, {"stage": 3, "tuning": Tuning(keep_below=0)}],
}


def run_settings(settings: Sequence[dict[str, Any]]) -> list[list[bytes]]:
    return [of_ours(each, range(3)) for each in settings]


@pytest.mark.parametrize("world", SETTINGS)
def test_bits_of_torch_on_each_matrix(ranks: Pool, world: int) -> None:
    keywords = KEYWORDS[world % 2]
    expected = of_torch(keywords, 3)
    found = ranks.run(run_settings, [{**keywords, **each} for each in SETTINGS[world]], world=world)
    for runs in found:
        for setting, params in zip(SETTINGS[world], runs, strict=True):
            equal = [one == other for one, other in zip(params, expected, strict=True)]
            assert all(equal), (setting, equal)


def test_a_checkpoint_at_another_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    ranks.run(of_ours, {**KEYWORDS[0], "stage": 3, "tuning": CHUNKED}, range(2), "", saved, world=2)
    assert ranks.run(of_ours, {**KEYWORDS[0], "stage": 1}, range(2, 4), saved, world=1) == [of_torch(KEYWORDS[0], 4)]


def test_each_matrix_is_counted_with_its_own_cost() -> None:
    """A large matrix and two small ones: what is packed and balanced is not three of one third."""
    optimizer = ShardedMuon([{"params": [Parameter(torch.zeros(48, 64))], "matrices": (32, 8, 8)}])
    (group,) = optimizer.param_groups
    (planned,) = plan_buckets([("qkv", group["params"][0], group)], muon, optimizer.options, 2, lambda _: 1 << 20)
    stats = matrix_stats(muon, planned.members, planned.layout)
    assert (stats.matrices, stats.whole, stats.sliced) == (3, 2, 32 * 64)  # half of all rows cuts the large one
    assert sum(cost_of(*each) for each in matrices_of((48, 64), (32, 8, 8))) == cost_of(32, 64) + 2 * cost_of(8, 64)


@pytest.mark.parametrize(
    ("shape", "matrices", "kind", "words"),
    [
        (
            (47, 64),
            (32, 8, 8),
            ValueError,
            "matrices=(32, 8, 8) takes 2D params of 48 rows, found one of shape (47, 64)",
        ),
        ((48,), (32, 8, 8), ValueError, "takes 2D params of 48 rows"),
        ((48, 64), (32, 16, 0), ValueError, "matrices takes the rows of each matrix, at least 1, found (32, 16, 0)"),
        ((48, 64), (), ValueError, "matrices takes the rows of each matrix"),
        ((48, 64), (32, 8.0, 8), ValueError, "matrices takes the rows of each matrix"),
        ((48, 10), (32, 8, 8), ShardoptError, "they begin at elements [0, 320], not all at multiples of 256"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit(shape: tuple[int, ...], matrices: Any, kind: type[Exception], words: str) -> None:
    with raises(kind, words):
        ShardedMuon([{"params": [torch.zeros(shape)], "matrices": matrices}])


def test_rows_that_are_not_adjacent_take_one_step_size() -> None:
    columns = torch.zeros(16, 48).T
    with raises(ShardoptError, "their rows are not adjacent"):
        ShardedMuon([{"params": [columns], "matrices": (32, 8, 8)}])
    weight = Parameter(torch.randn(64, 48).T)
    parts = [Parameter(each.detach().T.contiguous().T) for each in weight.split([32, 8, 8])]
    ours, theirs = ShardedMuon([{"params": [weight], "matrices": (32, 8, 8)}]), torch.optim.Muon(parts)
    with one_thread():
        weight.grad = torch.sin(torch.arange(48 * 64.0)).view(64, 48).T
        for part, grad in zip(parts, weight.grad.split([32, 8, 8]), strict=True):
            part.grad = grad.T.contiguous().T
        ours.step()
        theirs.step()
    assert raw(weight) == raw(torch.cat(parts))


def test_a_first_pass_that_depends_on_the_shape_is_refused() -> None:
    @rule(states=("seen",), scalars=lambda group, step, carried: {"scale": float(group["shape"][0])})
    def scaled(param: Any, grad: Any, state: Any, s: Any) -> Any:
        state.seen = grad * s.scale
        return state.seen

    @matrix_rule(accumulate=scaled, apply=muon_rules.apply)
    def own(update: Tensor, group: Any) -> Tensor:
        return update

    defaults = ShardedMuon([torch.zeros(1, 1)]).defaults
    with raises(ShardoptError, "the first pass of the rule depends on their shapes"):
        ShardedOptimizer([{"params": [torch.zeros(48, 64)], "matrices": (32, 8, 8)}], defaults, rule=own)
