"""Values that a shard encodes a piece at a time have the bits of the whole, in memory and on a disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shardopt import ShardedAdagrad, ShardedAdamW, prepare_states
from shardopt.kernels import codecs
from shardopt.kernels.formats import BF16, SIGNED8, SPLIT, SPLIT24, Format
from tests.support.cases import fill_gradients

NUMEL = 2 * 2**20 + 2**18 + 77  # pieces in each of three chunks of a disk, and a last block that is not full
MASTERS = {"split": SPLIT, "split24": SPLIT24}


def drawn(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL).to(dtype)


def as_kept(values: torch.Tensor, format: Format) -> torch.Tensor:
    return codecs.decode(*codecs.encode(values, format), format)


def test_values_are_cut_into_more_than_one_piece() -> None:
    assert len(list(codecs.pieces(drawn()))) > 3
    assert [piece.numel() for piece in codecs.pieces(torch.empty(0))] == [0]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("master", MASTERS)
def test_loaded_states_and_masters(master: str, on_disk: bool, tmp_path: Path) -> None:
    param = Parameter(drawn(torch.bfloat16))
    options: dict[str, Any] = {"offload": str(tmp_path / "states")} if on_disk else {}
    opt = ShardedAdamW(
        [param], lr=0.0, master=master, state_format={"exp_avg": "int8", "exp_avg_sq": "bf16"}, **options
    )
    fill_gradients([param], "integers", 0)
    opt.step()
    fits = param.detach().float() * (1 + 2.0**-10)
    loaded = {"step": torch.tensor(1.0), "exp_avg": drawn(), "exp_avg_sq": drawn().square(), "master": fits}
    opt.load_state_dict({"state": {0: loaded}, "param_groups": opt.state_dict()["param_groups"]})
    kept = opt.state[param]
    rest = codecs.low_bits_of(fits, param.detach(), MASTERS[master])
    assert rest.any()
    assert torch.equal(kept["exp_avg"], as_kept(loaded["exp_avg"], SIGNED8))
    assert torch.equal(kept["exp_avg_sq"], as_kept(loaded["exp_avg_sq"], BF16))
    assert torch.equal(kept["master"], codecs.join(param.detach(), rest, MASTERS[master]))
    opt.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_masters_that_follow_written_weights(on_disk: bool, tmp_path: Path) -> None:
    """A master stays where it rounds to the weight, and becomes the weight elsewhere."""
    param = Parameter(drawn(torch.bfloat16))
    options: dict[str, Any] = {"offload": str(tmp_path / "states")} if on_disk else {}
    opt = ShardedAdamW([param], lr=1e-3, weight_decay=0.0, **options)
    fill_gradients([param], "integers", 0)
    opt.step()
    before = opt.state[param]["master"].clone()
    assert torch.equal(before.bfloat16(), param.detach()) and not torch.equal(before, param.detach().float())
    with torch.no_grad():
        param[1_500_000:] += 1.0
    after, weights = opt.state[param]["master"], param.detach().float()
    assert torch.equal(after[:1_500_000], before[:1_500_000])
    changed = before.bfloat16() != param.detach()
    assert torch.equal(after, torch.where(changed, weights, before)) and changed[-1000:].any()
    opt.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_that_begin_with_a_number(on_disk: bool, tmp_path: Path) -> None:
    param = Parameter(drawn())
    options: dict[str, Any] = {"offload": str(tmp_path / "states")} if on_disk else {}
    opt = ShardedAdagrad([param], lr=0.3, initial_accumulator_value=0.3, **options)
    prepare_states(opt)
    assert torch.equal(opt.state[param]["sum"], torch.full((NUMEL,), 0.3))
    opt.close()
