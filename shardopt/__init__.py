"""shardopt: write an optimizer's update rule once; get it fused and sharded over ranks, with the same bits everywhere.

    opt = shardopt.ShardedAdamW(model.parameters(), lr=3e-4)  # was torch.optim.AdamW

Triton, Numba and what checkpoints need load on first use: importing this needs none of them, and no GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "verify",
]


# Public name -> the module that it is in. They load on first use: most scripts ask for none of them.
_LATER = {
    "DeepSpeedRun": "integrations.deepspeed.config",
    "Difference": "tools.verify",
    "Part": "tensors.part",
    "ShardedAdafactor": "optim.adafactor",
    "ShardedLAMB": "optim.large_batch",
    "ShardedLARS": "optim.large_batch",
    "ShardedMuon": "optim.muon",
    "Verdict": "tools.verify",
    "from_deepspeed_config": "integrations.deepspeed.config",
    "load_checkpoint": "checkpoint.load",
    "matrix_rule": "rules.matrix",
    "partition_activations": "activations.partition",
    "prepare_states": "checkpoint.prepare",
    "save_checkpoint": "checkpoint.save",
    "verify": "tools.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    """Public names, without the modules that Python binds here when they are imported."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
