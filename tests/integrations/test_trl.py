"""TRL at stage 3: its ``SFTTrainer``, whose loss multiplies by ``lm_head.weight`` in the root's forward, and its losses
in chunks, which read that weight in a function of their own.

Beside the Trainer, the same one on the same data with ``torch.optim.AdamW`` under DDP; beside losses, a plain model.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import ShardedAdamW, ShardedSGD, Tuning
from tests.integrations.test_hf_trainer import ADAMW, Samples
from tests.support.launch import launch
from tests.support.ranks import Pool
from tests.support.training import apart

pytest.importorskip("trl", reason="pip install trl")

STEPS = 4


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, max_position_embeddings=32, **sizes, **ends))


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(48)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")


def train(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses that it logged."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        folder,
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    rows = [{"input_ids": row.tolist()} for row in Samples(1, 64).tokens]
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(
        model, args=arguments, train_dataset=data, processing_class=make_tokenizer(), optimizers=(optimizer, None)
    )
    trainer.train()
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trains(folder: str) -> None:
    model = make_model()
    losses = train(folder, model, torch.optim.AdamW(model.parameters(), **ADAMW))
    assert len(losses) == STEPS and losses[-1] < losses[0]
    expected = values_of(model)
    for neighbours in (True, False):
        model = make_model()
        tuning = Tuning(bucket_bytes=20_000, keep_below=300, live_bytes=0, neighbours=neighbours)
        opt = ShardedAdamW(model, **ADAMW, stage=3, tuning=tuning)
        torch.testing.assert_close(torch.tensor(train(folder, model, opt)), torch.tensor(losses), rtol=2e-4, atol=2e-5)
        with opt.unsharded():
            assert apart(values_of(model), expected, values_of(make_model())) < 1e-3
        opt.close()


def test_sft_trainer(tmp_path: Any) -> None:
    launch(trains, str(tmp_path), frameworks=True)


# -- losses in chunks --------------------------------------------------------------------------------------------------


def in_chunks(kind: str) -> nn.Module:
    model = make_model()
    if kind == "grpo":
        from trl.trainer.utils import patch_chunked_lm_head

        patch_chunked_lm_head(model, 5, 1.0)
    else:
        from trl.trainer.sft_trainer import _patch_chunked_ce_lm_head

        _patch_chunked_ce_lm_head(model, chunk_size=5)
    return model


def loss_of(kind: str, model: nn.Module, tokens: Tensor) -> Tensor:
    found = model(input_ids=tokens, labels=tokens)
    return -found["log_probs"].float().mean() if kind == "grpo" else found.loss


def trains_in_chunks() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for kind in ("grpo", "sft"):
        plain = in_chunks(kind)
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        tuning = Tuning(keep_below=1, live_bytes=0)
        low: dict[str, Any] = {"compute_dtype": torch.bfloat16}
        models = [in_chunks(kind) for _ in range(3)]
        several = ({"stage": 1}, {"stage": 3}, {"stage": 3, **low})
        opts = [ShardedSGD(model, lr=0.1, tuning=tuning, **each) for model, each in zip(models, several, strict=True)]
        for step in range(2):
            tokens = Samples(2 * step + rank, 4).tokens
            expected = loss_of(kind, plain, tokens)
            expected.backward()
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= world
            sgd.step()
            sgd.zero_grad()
            for model, opt, options in zip(models, opts, several, strict=True):
                loss = loss_of(kind, model, tokens)
                loss.backward()
                opt.step()
                opt.zero_grad()
                torch.testing.assert_close(loss, expected, rtol=0.01 if "compute_dtype" in options else 1e-5, atol=0)
        for model, opt, options in zip(models, opts, several, strict=True):
            with opt.unsharded():
                limit = 0.05 if "compute_dtype" in options else 1e-4
                assert apart(values_of(model), values_of(plain), values_of(make_model())) < limit
            opt.close()


def test_losses_in_chunks(ranks: Pool) -> None:
    ranks.run(trains_in_chunks, world=2)
