"""A Mixtral of Transformers, its experts spread over ranks, trains as torch.optim does in one process on all of it."""

from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh

from shardopt import ShardedAdamW, Tuning
from tests.support.composed import OPTIONS
from tests.support.launch import launch
from tests.support.moe import groups_of
from tests.support.ranks import TIMEOUT

STEPS, WORLD, NUM, MAX_NORM = 6, 4, 4, 0.5
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra 'frameworks'")


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=NUM,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model: nn.Module = MixtralForCausalLM(config)
    return model


def own_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's experts of all."""
    return whole.chunk(group.size())[group.rank()]


def spread(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class SpreadExperts(MixtralExperts):
        """The experts of one rank of a group, which get the tokens of all of its ranks."""

        group: dist.ProcessGroup

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            given = (hidden_states, top_k_index, top_k_weights)
            tokens, chosen, weights = (all_gather_tensor_autograd(each, 0, self.group) for each in given)
            chosen = chosen - self.group.rank() * self.num_experts
            elsewhere = (chosen < 0) | (chosen >= self.num_experts)
            done = super().forward(tokens, chosen.masked_fill(elsewhere, self.num_experts), weights)
            done = done + (tokens + weights.sum(1, keepdim=True)) * 0.0  # a rank without a token takes part in backward
            return reduce_scatter_tensor_autograd(done, "sum", 0, self.group)

    for each in model.modules():
        if isinstance(each, MixtralExperts):
            each.__class__, each.group, each.num_experts = SpreadExperts, group, NUM // group.size()
            each.gate_up_proj = nn.Parameter(own_rows(each.gate_up_proj.detach(), group).clone())
            each.down_proj = nn.Parameter(own_rows(each.down_proj.detach(), group).clone())
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(48, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def trains(stages: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    copies, group = mesh["copies"].get_group(), mesh["experts"].get_group()
    for stage in stages:
        whole = mixtral()
        expected = torch.optim.AdamW(whole.parameters(), **OPTIONS["AdamW"])
        model = spread(mixtral(), group)
        options: dict[str, Any] = {**OPTIONS["AdamW"], "max_grad_norm": MAX_NORM}
        tuning = Tuning(bucket_bytes=4000, keep_below=0, live_bytes=0)
        optimizer = ShardedAdamW(groups_of(model, copies), module=model, stage=stage, tuning=tuning, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, dist.get_rank()).backward()
            optimizer.step()
            expected.zero_grad()
            for rank in range(WORLD):
                (loss_of(whole, step, rank) / WORLD).backward()
            norm = float(nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM))
            expected.step()
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5) and norm > MAX_NORM
            with optimizer.unsharded():
                for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
                    theirs = own_rows(theirs, group) if ".experts." in name else theirs
                    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=2e-4, atol=5e-6)
        optimizer.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_experts_of_mixtral() -> None:
    launch(trains, [1, 2, 3], world=WORLD, frameworks=True)
