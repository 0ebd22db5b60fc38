"""How do states look and travel outside of shards?

In torch's shapes: as one param's state, as the mapping ``optimizer.state``, as a state dict, whole on one rank. What
lies on other ranks is shown as parts.
"""
