"""Hyper-parameters that a checkpoint holds: whether the next step can be computed from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..domain.hyperparameters import check_numbers, plain_numbers
from ..errors import CheckpointError
from . import values
from .engine import Engine
from .fit import Fit
from .manifest import Manifest
from .plan_load import carried_of
from .records import Key


def check_groups(manifest: Manifest, fitting: Fit, engines: Sequence[Engine]) -> None:
    """Evaluates every group's scalars once, as the next step will. Changes nothing.

    Raises:
        CheckpointError: they cannot be computed, with what the checkpoint holds.
    """
    for (number, index), saved in fitting.groups.items():
        engine = engines[number]
        names = manifest.optimizers[number]["groups"][index]["params"]
        try:
            # Tensors are learning rates and the like: any number will do.
            decoded = values.decode(saved, lambda name: _stand_in(manifest, name))
            plain = plain_numbers({**engine.groups[index], **decoded})
            check_numbers([plain], engine.defaults)
            _check_arguments(decoded, engine)
            variant = engine.rule.variant(plain)
            for step, carried in _counts(manifest, names):
                engine.rule.evaluate(variant, plain, step + 1, carried)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint's group {index} of optimizer {number} holds hyper-parameters that no step can be "
                f"computed from ({type(error).__name__}: {error}): {_told(saved)}. Nothing was loaded. Load another "
                "checkpoint."
            ) from error


def _check_arguments(given: Mapping[str, Any], engine: Engine) -> None:
    """As the optimizer's class checks those of a param group."""
    if engine.check_arguments is not None:
        engine.check_arguments(given)
    refused = [key for key in ("capturable", "differentiable") if given.get(key)]
    if refused:
        raise ValueError(f"{refused[0]} is refused here")


def _counts(manifest: Manifest, names: Sequence[str]) -> list[tuple[int, dict[str, float]]]:
    """The different step counts and carried scalars of these params."""
    found: dict[tuple[Any, ...], tuple[int, dict[str, float]]] = {(0,): (0, {})}
    for name in names:
        about = manifest.params[name]
        if about["has_state"]:
            carried = carried_of(about)
            found[about["step"], *carried.items()] = about["step"], carried
    return list(found.values())


def _stand_in(manifest: Manifest, name: str) -> torch.Tensor:
    return torch.ones(()).expand(manifest.tensors[Key("extra", name, "value")].shape)


def _told(saved: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r:.40}" for key, value in saved.items() if value is not None)[:300]
