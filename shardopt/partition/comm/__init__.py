"""How does a slice get to another rank?

There is an all-gather and a reduce-scatter for each connection that ranks may have: collectives of the backend,
messages, and reads of a peer's memory. ``transport.py`` chooses one of each when a domain is bound.
"""
