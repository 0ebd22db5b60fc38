"""A GPU and NCCL of which only the order is real: what runs behind what, on CPU tensors, in one process.

::

    with Machine(world=8) as machine:
        model = machine.move(nn.Linear(48, 48))        # its params say that they are on "cuda:0"
        optimizer = shardopt.ShardedAdamW(model, process_group=machine.group)
        ... train ...
    assert not machine.races

* ``clocks.py``: agents (streams, threads of the host, the process group) and what each knows to have ended.
* ``regions.py``: memory of the device and of the host, who used which bytes of it, and whether two uses are a race.
* ``cuda.py``: ``torch.cuda``: streams and events that move clocks.
* ``tensors.py``: which tensors are on the device; what moves them there and back.
* ``operations.py``: each ATen operation is a use of the memory of its tensors.
* ``kernels.py``: the Triton backend, whose launches the native kernels carry out.
* ``group.py``: a process group whose collectives run on a stream of their own.
* ``hooks.py``: autograd, which runs the hooks of params on several streams.
* ``counts.py``: kernels, blocking copies and waits of the host, by phase.
* ``record.py``: all works of all engines, in bytes, with what each waits for (``tests/support/timeline`` times them).
* ``machine.py``: all of it together.

Two uses of the same bytes, one of them a write, of which no order makes one come after the other, are a race, whether
or not the values would differ. So is memory that goes back to torch's allocator while a stream may still use it that
the allocator does not know of.
"""

from .machine import Machine

__all__ = ["Machine"]
