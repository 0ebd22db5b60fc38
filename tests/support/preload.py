"""What every process of the tests has imported before its first test; the fork server imports this module once.

A process that starts from nothing spends three to five seconds of a core on importing torch, Numba and shardopt. The
ranks of a run are forked from a process that has done so, and start in milliseconds. Nothing here may start a thread
or run a backward: neither survives a fork.
"""
# ruff: noqa: E402, F401

import gc
import os
from contextlib import suppress
from types import SimpleNamespace

gc.disable()  # what is imported stays: collections meanwhile take a sixth of the time
if not os.path.exists("/dev/nvidiactl"):
    # Read when Triton is imported: its kernels then run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numba
import torch
import torch._dynamo  # torch imports it at an optimizer's first zero_grad()
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

import shardopt
import shardopt.activations.partition
import shardopt.calls.gradients
import shardopt.calls.moves
import shardopt.calls.reports
import shardopt.calls.surgery
import shardopt.calls.whole_params
import shardopt.checkpoint.load
import shardopt.checkpoint.prepare
import shardopt.checkpoint.save
import shardopt.compilers.native
import shardopt.engine  # and all below it: a module that loads while a test has patched another keeps what it saw
import shardopt.kernels.native_backend
import shardopt.kernels.native_formats
import shardopt.kernels.native_reductions
import shardopt.kernels.native_words
import shardopt.optim.shadow
import shardopt.remote.peers
import shardopt.remote.serve
from tests.support import compiled_once, interpreter

if hasattr(os, "SCHED_BATCH"):
    # Ranks outnumber cores. One that a message wakes would take the core from the rank that sends it, while that one
    # still holds gloo's lock on their connection; gloo's thread polls for the lock until the sender runs again, which
    # took a fifth of the processor. Threads of this policy, which those forked from here have too, wait for their turn.
    with suppress(OSError):  # a sandbox that forbids it makes tests slower, not wrong
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Ten seconds are a stranger's time. On a busy machine a rank may get no core for as long, and is not dropped for it.
# Tests of strangers set a short time.
shardopt.remote.serve.HANDSHAKE = shardopt.remote.peers.HANDSHAKE = 600.0
for devices in (torch.cuda, torch.xpu):
    # torch.manual_seed() seeds devices that are not there later, and keeps the stack of now for each: 1 ms a model.
    devices.traceback = SimpleNamespace(format_stack=list)  # type: ignore[assignment]
for is_deterministic in (True, False):  # as ranks ask for: it imports torch's compiler, 800 modules
    torch.use_deterministic_algorithms(is_deterministic)
interpreter.install()
compiled_once.install()
compiled_once.make_ready()
gc.collect()
# A full collection walks a million objects of these libraries, a third of a second each time that a test asks for one.
# Frozen, they are passed over.
gc.freeze()
gc.enable()
