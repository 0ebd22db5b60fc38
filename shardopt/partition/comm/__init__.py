"""How does a slice get to another rank?

An all-gather and a reduce-scatter for each way that ranks have: collectives of the backend, messages, and reading a
neighbour's memory. ``transport.py`` chooses one when a domain is bound.
"""
