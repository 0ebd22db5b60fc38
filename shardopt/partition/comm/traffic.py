"""Bytes on the wire, counted by the rank that receives them."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes that this rank received from others, by kind; the few bytes of agreements are not counted."""

    params: int = 0
    gradients: int = 0
    states: int = 0  # slices that were gathered for reading
