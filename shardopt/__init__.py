"""shardopt: write an optimizer's update rule once; get it fused and sharded over ranks, with the same bits everywhere.

    opt = shardopt.ShardedAdamW(model.parameters(), lr=3e-4)  # was torch.optim.AdamW

Triton and Numba load on first use: importing this needs neither, and no GPU.
"""

from .config import Offload, Tuning
from .errors import (
    BindingError,
    CommunicationError,
    DisagreementError,
    OffloadError,
    ReleasedError,
    RuleError,
    ShardoptError,
    StateError,
    UnsupportedVersionError,
)
from .optim import (
    ShardedAdadelta,
    ShardedAdagrad,
    ShardedAdam,
    ShardedAdamax,
    ShardedAdamW,
    ShardedASGD,
    ShardedLion,
    ShardedNAdam,
    ShardedRAdam,
    ShardedRMSprop,
    ShardedRprop,
    ShardedSGD,
)
from .optimizer import ShardedOptimizer
from .part import Part
from .rules import rule

__version__ = "0.1.0"

__all__ = [
    "BindingError",
    "CommunicationError",
    "DisagreementError",
    "Offload",
    "OffloadError",
    "Part",
    "ReleasedError",
    "RuleError",
    "ShardedASGD",
    "ShardedAdadelta",
    "ShardedAdagrad",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedAdamax",
    "ShardedLion",
    "ShardedNAdam",
    "ShardedOptimizer",
    "ShardedRAdam",
    "ShardedRMSprop",
    "ShardedRprop",
    "ShardedSGD",
    "ShardoptError",
    "StateError",
    "Tuning",
    "UnsupportedVersionError",
    "rule",
]
