"""Promise: on a GPU slices go to host memory and back in the order of streams, and forward waits for nothing.

On the stand-in of CUDA, whose process group is NCCL's: it carries no host memory, so that rows of numbers travel on the
device. There is no GPU here; the bits of this path are those of the same calls on CPU tensors.
"""

import torch
from torch.utils.checkpoint import checkpoint

from shardopt import partition_activations
from tests.support.streams import Machine
from tests.support.streams.counts import BLOCKING_COPIES, COLLECTIVES, COPIES, HOST_WAITS

BLOCKS, WIDTH = 3, 100


def test_slices_rest_on_the_host_without_a_race() -> None:
    for world, offload in ((1, "cpu"), (4, "cpu"), (4, None)):
        with Machine(world=world) as machine:
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
            machine.move(model)
            x = machine.tensor(torch.randn(7, WIDTH)).requires_grad_()
            for step in range(3):
                with (
                    machine.during("forward"),
                    partition_activations(machine.group, offload=offload, keep_below=1) as context,
                ):
                    y = x * 2
                    for block in model:
                        y = checkpoint(block, y, use_reentrant=False)
                kept = context.memory()
                tier = "host" if offload else "device"
                assert kept["partitioned"] == {tier: BLOCKS * -(-7 * WIDTH * 4 // (world * 16)) * 16}, (kept, step)
                with machine.during("backward"):
                    y.sum().backward()
                del y
                counts = machine.book.counts
                if step:
                    # Nothing is waited for in forward; in backward only the checksums, once. Rows of numbers travel
                    # beside the device.
                    assert not counts.by_phase["forward"][HOST_WAITS] + counts.by_phase["forward"][BLOCKING_COPIES]
                    assert counts.by_phase["backward"][HOST_WAITS] == (1 if world > 1 else 0), counts.sites
                    assert counts.by_phase["backward"][COLLECTIVES] == (BLOCKS if world > 1 else 0)
                assert counts.by_phase["forward"][COPIES] == (BLOCKS if offload else 0)
                counts.forget()
            assert not machine.races, machine.races
