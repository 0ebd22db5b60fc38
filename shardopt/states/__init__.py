"""How do states look and travel outside of shards?

In torch's shapes: as the state of one param (``shard_io.py``), of all of them (``table.py``), as a
state dict (``torch_format.py``), whole on one rank (``consolidate.py``, which all ranks call). A tensor that lies on
other ranks as well is shown as a part; one rank alone that saves it reads the rest by ``domain/remote_states.py``.
"""
