"""Bytes on the wire, counted where they are received."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes that this rank received from others, by what they were; the few bytes of agreements are not counted."""

    params: int = 0
    gradients: int = 0
    states: int = 0  # parts that were gathered for reading
