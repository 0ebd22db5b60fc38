"""What happens around forward and backward?

A module that was taken over has hooks: its first forward binds the params, each forward at stage 3 gathers params, and
each backward delivers gradients to the reducer. A DDP module loses its own reducer here.
"""
