"""What processes that train with a framework have imported; a fork server of their own imports this module once.

Each framework takes three seconds of a core to import, in each rank of each launch. They ask the network for nothing,
and report to nobody, which some of them read when they are imported.
"""
# ruff: noqa: E402, F401

import gc
import os
from contextlib import suppress

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_DISABLED": "true", "DO_NOT_TRACK": "1"}
os.environ.update(OFFLINE)

from tests.support import preload

gc.disable()
with suppress(ImportError):  # they are an extra
    import accelerate
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
with suppress(ImportError):
    import lightning.pytorch

gc.collect()
gc.freeze()
gc.enable()
