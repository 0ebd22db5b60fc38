"""What this process may use of its machine, which it shares with the other ranks there."""

import os


def ranks_here() -> int:
    """The number of ranks on this machine, as torchrun says it; 1 if nobody says."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdecimal() and int(said) > 0 else 1


def cores_of_this_rank() -> int:
    """This rank's share of the cores that the process may run on."""
    return max(len(os.sched_getaffinity(0)) // ranks_here(), 1)
