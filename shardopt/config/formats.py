"""The stages and formats by the words that users give."""

from typing import Literal

Stage = Literal[0, 1, 2, 3]
Master = Literal["fp32", "split", "split24", "none"]
StateFormat = Literal["fp32", "bf16", "int8"]  # from exact to coarse
GradientFormat = Literal["fp32", "bf16"]
Traffic = Literal["int8"]  # of what travels between ranks
