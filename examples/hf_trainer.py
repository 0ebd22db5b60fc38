"""Hugging Face Trainer: it makes the param groups (no decay for biases and norms), shardopt the optimizer.

python examples/hf_trainer.py                                        one process
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py      two ranks
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shardopt import ShardedAdamW


def main(folder: str) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0))
    tokens = [(torch.arange(12) * 5 + start) % 48 for start in range(64)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,  # of the schedule; that of the optimizer stands below
        weight_decay=0.1,
        max_grad_norm=1.0,
        save_steps=3,
        logging_steps=3,
        report_to=[],
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
    )
    adamw = (ShardedAdamW, {"lr": 1e-2, "module": model, "stage": 2})
    Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=adamw).train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out")
