"""``resize_token_embeddings()`` of a Transformers model between steps, at every stage, and the way on."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardopt import BindingError, ReleasedError, ShardedAdamW, ShardedOptimizer, Tuning
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import raises

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs the extra 'frameworks': pip install .[frameworks]"
)

WORDS, MORE = 48, 53


def make_model(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes, **ends))


def train_step(model: nn.Module, opt: ShardedOptimizer, words: int) -> None:
    tokens = (7 * torch.arange(24).reshape(2, 12)) % words
    opt.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.float().backward()
    opt.step()


def whole(model: nn.Module, opt: ShardedOptimizer) -> dict[str, Tensor]:
    with opt.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def resized(stage: int, tied: bool, **options: Any) -> list[dict[str, Tensor]]:
    model = make_model(tied)
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=Tuning(keep_below=1), **options)
    train_step(model, opt, WORDS)
    before = whole(model, opt)
    if stage == 3:
        with raises(ReleasedError, "with optimizer.unsharded()"):
            model.resize_token_embeddings(MORE, mean_resizing=False)
    torch.manual_seed(1)
    with opt.unsharded():
        model.resize_token_embeddings(MORE, mean_resizing=False)
    with raises(BindingError, "call optimizer.rebind()", "embed_tokens"):
        train_step(model, opt, MORE)
    opt.rebind()
    now = whole(model, opt)
    assert now["model.embed_tokens.weight"].shape == (MORE, 32)
    for name, value in before.items():
        assert raw(now[name][: len(value)]) == raw(value), name  # all bits
    train_step(model, opt, MORE)
    steps = {name: int(opt.state[param]["step"]) for name, param in model.named_parameters()}
    assert {name for name, step in steps.items() if step == 1} == now.keys() - {
        name for name, value in before.items() if now[name].shape == value.shape
    }
    found = [now, whole(model, opt)]
    opt.close()
    return found


def at_every_stage() -> None:
    for tied in (False, True):
        for options in ({}, {"compute_dtype": torch.bfloat16}):
            expected = resized(1, tied, **options)
            for stage in (2, 3):
                for one, other in zip(expected, resized(stage, tied, **options), strict=True):
                    assert {name: raw(each) for name, each in one.items()} == {n: raw(e) for n, e in other.items()}


def test_resize_token_embeddings(ranks: Pool) -> None:
    ranks.run(at_every_stage, world=2)
