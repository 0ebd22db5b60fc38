"""Random numbers: the states of the generators that a training draws from, as tensors of bytes."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def states(device: torch.device) -> dict[str, torch.Tensor]:
    """Of torch on the CPU and on ``device``, of Python and of NumPy: 1D uint8, by name."""
    found = {"torch": torch.get_rng_state(), "python": _pack(random.getstate()), "numpy": _pack(_numpy_state())}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Those that were saved and exist here."""
    if "torch" in saved:
        torch.set_rng_state(saved["torch"])
    if "cuda" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)
    if "python" in saved:
        version, words, gauss = _unpack(saved["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in saved:
        name, words, *rest = _unpack(saved["numpy"])
        np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))


def _numpy_state() -> list[object]:
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state(legacy=True)]


def _pack(state: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpack(state: torch.Tensor) -> list[Any]:
    unpacked: list[Any] = json.loads(bytes(state.numpy()))
    return unpacked
