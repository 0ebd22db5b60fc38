"""The errors that shardopt raises on its own account.

::

    ShardoptError                 base of all of them, a RuntimeError
     +-- RuleError                an update rule that cannot be translated (names file and line)
     +-- BindingError             params that are not, or no longer, where the optimizer can update them
     +-- DisagreementError        ranks that do not hold, or do not do, the same thing
     +-- CommunicationError       a peer that died, stalled or left: names the phase of the step
     +-- ReleasedError            a sharded param was read outside of its module: names Tuning(keep=...)
     +-- OffloadError             a tier that cannot keep states or return them
     +-- StateError               a state dict that does not fit, or a part that cannot be saved as it is
     +-- CheckpointError          a checkpoint that is damaged, does not fit, or could not be saved
     +-- UnsupportedVersionError  a missing or untested Triton, Numba or torch

Mistakes that ``torch.optim`` itself reports keep torch's type and message. Every message names the call to make next,
what was found, and what would have gone wrong.
"""

import sys
import warnings

# Packages whose lines a warning skips: it names the line of the script.
_INSIDE = ("shardopt", "torch", "contextlib")


class ShardoptError(RuntimeError):
    """Base class of shardopt's errors."""


class RuleError(ShardoptError):
    """The source of an update rule uses something outside of the vocabulary."""


class BindingError(ShardoptError):
    """A param cannot be taken into a bucket, or was moved after it had been."""


class DisagreementError(ShardoptError):
    """Ranks differ in their params, options, gradients or calls."""


class CommunicationError(ShardoptError):
    """A collective did not finish: a peer is gone or late."""


class ReleasedError(ShardoptError):
    """The values of a param are on other ranks at this moment."""


class OffloadError(ShardoptError):
    """A tier cannot keep states or return them; params and states are unchanged on every rank."""


class StateError(ShardoptError):
    """A state dict does not fit this optimizer, or a part cannot answer what it was asked."""


class CheckpointError(ShardoptError):
    """A checkpoint is damaged, belongs to another model, or could not be saved."""


class UnsupportedVersionError(ShardoptError):
    """A library that a kernel needs is missing, or its version was never tested."""


def warn(message: str) -> None:
    """Warns at the line of the script that made the call."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
