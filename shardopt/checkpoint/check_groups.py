"""Checks that the next step can be computed from the hyper-parameters of a checkpoint's param groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..domain.hyperparameters import check_numbers, plain_numbers
from ..errors import CheckpointError
from . import values
from .records import TensorKey

if TYPE_CHECKING:
    from ..domain.hyperparameters import Group
    from ..engine import Engine
    from .match import ModelMatch
    from .records import Manifest
    from .typed_json import Encoded


def check_groups(manifest: Manifest, match: ModelMatch, engines: Sequence[Engine]) -> None:
    """Evaluates every group's scalars once, as the next step will. Changes nothing.

    Raises:
        CheckpointError: the values of the checkpoint allow no step.
    """
    for (number, index), saved in match.groups.items():
        engine = engines[number]
        names = manifest.optimizers[number].groups[index].params
        try:
            # Tensors are learning rates and the like: any number will do.
            decoded = values.decode_dict(saved, lambda name: _stand_in(manifest, name))
            plain = plain_numbers({**engine.groups[index], **decoded})
            check_numbers([plain], engine.defaults)
            _check_arguments(decoded, engine)
            variant = engine.rule.variant(plain)
            for step, carried in _counts(manifest, names):
                engine.rule.evaluate(variant, plain, step + 1, carried)
        except Exception as error:
            raise CheckpointError(
                f"load another checkpoint: group {index} of optimizer {number} holds hyper-parameters that no step can "
                f"be computed from ({type(error).__name__}: {error}): {_in_words(saved)}. Nothing was loaded."
            ) from error


def _check_arguments(given: Group, engine: Engine) -> None:
    """Checks hyper-parameters as the optimizer's class checks those of a param group."""
    if engine.check_arguments is not None:
        engine.check_arguments(given)
    refused = [key for key in ("capturable", "differentiable") if given.get(key)]
    if refused:
        raise ValueError(f"{refused[0]} is refused here")


def _counts(manifest: Manifest, names: Sequence[str]) -> list[tuple[int, dict[str, float]]]:
    """Returns the different step counts and carried scalars of these params."""
    found: dict[tuple[object, ...], tuple[int, dict[str, float]]] = {(0,): (0, {})}
    for name in names:
        about = manifest.params[name]
        if about.has_state:
            found[about.step, *about.carried.items()] = about.step, about.carried
    return list(found.values())


def _stand_in(manifest: Manifest, name: str) -> torch.Tensor:
    return torch.ones(()).expand(manifest.tensors[TensorKey("extra", name, "value")].shape)


def _in_words(saved: Encoded) -> str:
    return ", ".join(f"{key}={value!r:.40}" for key, value in saved.items() if value is not None)[:300]
