"""The states of random number generators that a training uses, as tensors of bytes."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError


def states(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the states of the generators of torch (CPU and ``device``), Python and NumPy: 1D uint8, by name."""
    found = {"torch": torch.get_rng_state(), "python": _pack(random.getstate()), "numpy": _pack(_numpy_state())}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def check(saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Tries the saved states on new generators.

    Raises:
        CheckpointError: a generator refuses its state.
    """
    kind = ""
    try:
        for kind in saved:
            if kind == "torch" or (kind == "cuda" and device.type == "cuda"):
                torch.Generator("cpu" if kind == "torch" else device).set_state(saved[kind])
            if kind == "python":
                random.Random().setstate(_python_state(saved[kind]))
            if kind == "numpy":
                np.random.RandomState().set_state(_numpy_state_of(saved[kind]))
    except Exception as error:
        raise CheckpointError(
            f"load another checkpoint, or load with the {kind} that saved it: the random numbers of {kind!r} are "
            f"not a state of that generator ({type(error).__name__}: {error}). Nothing was loaded."
        ) from error


def restore(saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Sets the generators that were saved, as far as they exist here."""
    for kind, state in saved.items():
        if kind == "torch":
            torch.set_rng_state(state)
        if kind == "cuda" and device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        if kind == "python":
            random.setstate(_python_state(state))
        if kind == "numpy":
            np.random.set_state(_numpy_state_of(state))


def _python_state(saved: torch.Tensor) -> tuple[Any, ...]:
    version, words, gauss = _unpack(saved)
    return version, tuple(words), gauss


def _numpy_state_of(saved: torch.Tensor) -> tuple[Any, ...]:
    name, words, *rest = _unpack(saved)
    return name, np.array(words, dtype=np.uint32), *rest


def _numpy_state() -> list[object]:
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state(legacy=True)]


def _pack(state: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpack(state: torch.Tensor) -> list[Any]:
    unpacked: list[Any] = json.loads(bytes(state.numpy()))
    return unpacked
