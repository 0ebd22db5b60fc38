"""TRL's ``SFTTrainer`` at stage 3: its loss multiplies by ``lm_head.weight`` in the root's forward.

Beside it, the same Trainer on the same data with ``torch.optim.AdamW`` under DDP.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardopt import ShardedAdamW, Tuning
from tests.integrations.test_hf_trainer import ADAMW, Samples
from tests.support.launch import launch
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
