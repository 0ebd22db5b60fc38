"""Calls as users write them, for a strict type checker: scripts/snippets.py has it read them. Nothing runs them.

``type: ignore`` says that there must be an error: a strict checker refuses one that is of no use.
"""

import torch

from shardopt import ShardedAdamW, ShardedOptimizer, ShardedSGD
from shardopt.rules.lion import lion

model = torch.nn.Linear(3, 3)
groups = [{"params": model.parameters(), "lr": 1e-3}]
stage: int = 2
ShardedAdamW(model, stage=2)
ShardedAdamW(torch.nn.DataParallel(model), lr=1e-3, stage=3, state_format={"exp_avg": "bf16"})
ShardedSGD(model.named_parameters(), module=model, offload="cpu")
ShardedOptimizer(groups, {"lr": 1e-4}, rule=lion, master="split")
ShardedAdamW(model, stage=4)  # type: ignore[arg-type]
ShardedAdamW(model, stage=stage)  # type: ignore[arg-type]
ShardedAdamW(model, master="fp8")  # type: ignore[arg-type]
ShardedAdamW(model, stge=2)  # type: ignore[call-arg]
ShardedAdamW(3)  # type: ignore[arg-type]
ShardedOptimizer(torch.ones(3, 3).shape, {}, rule=lion)  # type: ignore[arg-type]
