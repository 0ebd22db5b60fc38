"""PEFT's DoRA at stage 3: an adapter reads the frozen weight that it adapts from outside of that one's module.

Beside it, the same model and data with ``torch.optim.AdamW`` under DDP.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import ShardedAdamW, Tuning
from tests.support.ranks import Pool
from tests.support.training import apart

pytest.importorskip("peft", reason="pip install peft")

STEPS = 4
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def make_model() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, max_position_embeddings=32, **sizes))
    adapters = LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    return get_peft_model(model, adapters)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        tokens = torch.randint(0, 48, (2, 12), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def trains() -> None:
    model = make_model()
    losses = train(DistributedDataParallel(model), torch.optim.AdamW(trained(model), **ADAMW))
    expected = values_of(model)
    for neighbours in (True, False):
        model = make_model()
        tuning = Tuning(bucket_bytes=20_000, keep_below=100, live_bytes=0, neighbours=neighbours)
        opt = ShardedAdamW(trained(model), module=model, **ADAMW, stage=3, tuning=tuning)
        torch.testing.assert_close(torch.tensor(train(model, opt)), torch.tensor(losses), rtol=2e-4, atol=2e-5)
        with opt.unsharded():
            assert apart(values_of(model), expected, values_of(make_model())) < 1e-3
        opt.close()


def test_dora(ranks: Pool) -> None:
    ranks.run(trains, world=2)
