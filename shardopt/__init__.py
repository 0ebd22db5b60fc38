"""shardopt: write an optimizer's update rule once; get it fused and sharded over ranks, with the same bits everywhere.

    opt = shardopt.ShardedAdamW(model.parameters(), lr=3e-4)  # was torch.optim.AdamW

Triton and Numba load on first use: importing this needs neither, and no GPU.
"""

from typing import TYPE_CHECKING, Any

from .config import Tuning
from .errors import (
    BindingError,
    CommunicationError,
    DisagreementError,
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

if TYPE_CHECKING:
    from .deepspeed_config import DeepSpeedRun, from_deepspeed_config
    from .verification import Difference, Verdict, verify

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads what most scripts never ask for."""
    if name in ("DeepSpeedRun", "from_deepspeed_config"):
        from . import deepspeed_config

        return getattr(deepspeed_config, name)
    if name in ("Difference", "Verdict", "verify"):
        from . import verification

        return getattr(verification, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BindingError",
    "CommunicationError",
    "DeepSpeedRun",
    "Difference",
    "DisagreementError",
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
    "Verdict",
    "from_deepspeed_config",
    "rule",
    "verify",
]
