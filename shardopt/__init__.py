"""shardopt: write an optimizer's update rule once; get it fused and sharded over ranks, with the same bits everywhere.

    opt = shardopt.ShardedAdamW(model.parameters(), lr=3e-4)  # was torch.optim.AdamW
"""

from .config import Tuning
from .errors import (
    BindingError,
    CommunicationError,
    DisagreementError,
    RuleError,
    ShardoptError,
    StateError,
    UnsupportedVersionError,
)
from .optimizer import ShardedOptimizer
from .part import Part
from .rules import rule

__version__ = "0.1.0"
