"""shardopt: write an optimizer's update rule once; get it fused and sharded over ranks, with the same bits everywhere.

    opt = shardopt.ShardedAdamW(model.parameters(), lr=3e-4)  # was torch.optim.AdamW

Triton, Numba and what checkpoints need load on first use: importing this needs none of them, and no GPU.
"""

from typing import TYPE_CHECKING, Any

from . import beginning as beginning  # first: it keeps what sys.path is now
from .config import Offload, Tuning
from .errors import (
    BindingError,
    CheckpointError,
    CommunicationError,
    DisagreementError,
    OffloadError,
    ReleasedError,
    RuleError,
    ShardoptError,
    StateError,
    UnsupportedVersionError,
)
from .optim.classes import (
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
from .optim.optimizer import ShardedOptimizer
from .rules import rule
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .activations.partition import partition_activations
    from .checkpoint.load import load_checkpoint
    from .checkpoint.prepare import prepare_states
    from .checkpoint.save import save_checkpoint
    from .checkpoint.weights import save_weights
    from .integrations.deepspeed.config import DeepSpeedRun, from_deepspeed_config
    from .optim.adafactor import ShardedAdafactor
    from .optim.large_batch import ShardedLAMB, ShardedLARS
    from .optim.muon import ShardedMuon
    from .rules.matrix import matrix_rule
    from .tensors.part import Part
    from .tools.verify import Difference, Verdict, verify

__all__ = [
    "BindingError",
    "CheckpointError",
    "CommunicationError",
    "DeepSpeedRun",
    "Difference",
    "DisagreementError",
    "Offload",
    "OffloadError",
    "Part",
    "ReleasedError",
    "RuleError",
    "ShardedASGD",
    "ShardedAdadelta",
    "ShardedAdafactor",
    "ShardedAdagrad",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedAdamax",
    "ShardedLAMB",
    "ShardedLARS",
    "ShardedLion",
    "ShardedMuon",
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
    "load_checkpoint",
    "matrix_rule",
    "partition_activations",
    "prepare_states",
    "rule",
    "save_checkpoint",
    "save_weights",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads what most scripts never ask for; by statements, as no name that comes from outside may load a module."""
    found: Any
    if name == "save_checkpoint":
        from .checkpoint.save import save_checkpoint as found
    elif name == "save_weights":
        from .checkpoint.weights import save_weights as found
    elif name == "load_checkpoint":
        from .checkpoint.load import load_checkpoint as found
    elif name == "prepare_states":
        from .checkpoint.prepare import prepare_states as found
    elif name == "partition_activations":
        from .activations.partition import partition_activations as found
    elif name in ("ShardedLAMB", "ShardedLARS"):
        from .optim import large_batch

        found = getattr(large_batch, name)
    elif name == "ShardedAdafactor":
        from .optim.adafactor import ShardedAdafactor as found
    elif name == "ShardedMuon":
        from .optim.muon import ShardedMuon as found
    elif name == "Part":
        from .tensors.part import Part as found
    elif name == "matrix_rule":
        from .rules.matrix import matrix_rule as found
    elif name in ("DeepSpeedRun", "from_deepspeed_config"):
        from .integrations.deepspeed import config as deepspeed_config

        found = getattr(deepspeed_config, name)
    elif name in ("Difference", "Verdict", "verify"):
        from .tools import verify as verification

        found = getattr(verification, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Public names, without the modules that Python binds here when they are imported."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
