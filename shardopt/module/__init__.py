"""What happens around forward and backward?

A module that was handed over has hooks: its first forward binds, at stage 3 each forward gathers params, each
backward hands gradients to the reducer. A DDP module loses its own reducer here.
"""
