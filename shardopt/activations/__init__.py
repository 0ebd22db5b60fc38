"""What does autograd keep between forward and backward, and where?

:func:`shardopt.partition_activations` keeps it once over the ranks of a tensor-parallel group (ZeRO-R). Read
``partition.py`` first: the context. ``saved_tensors.py`` has what one ``with`` keeps, ``decisions.py`` what the ranks
know of it, ``packed.py`` the two ways to keep a tensor.
"""
