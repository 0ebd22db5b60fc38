"""Compiled kernels executed without a GPU: an interpreter of PTX in NumPy, and a driver that Triton launches through.

::

    with Driver() as driver:                       # launches of Triton's kernels are compiled for sm_90 and executed
        driver.memory.allow(grad)                  # what a kernel reaches through an address in a table
        triton_backend.run(spec, 0, streams, ...)  # on CPU tensors

``text.py`` reads PTX, ``numbers.py`` has its kinds of numbers and ``operations.py`` its arithmetic as tables,
``memory.py`` global and shared memory, ``registers.py`` the registers of all threads; ``machine.py`` executes a grid,
``driver.py`` is what Triton sees, ``process.py`` a process in which Triton compiles kernels, ``executed.py`` says
which test executes what.

What is as on the chip: operations are rounded as their opcodes say, every NaN that arithmetic makes is 0x7fffffff, and
floats too large for an int become the largest one. What the chip would forgive is an error here: an access outside of
the launch's tensors, a register that is read before it is written, an exchange between warps without a barrier.
"""
