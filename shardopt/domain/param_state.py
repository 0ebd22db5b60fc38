"""The state of one param outside of its shard: what ``state_dict()`` shows and ``load_state_dict()`` takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import StateError
from ..rules import Rule
from ..rules.rule import EMA
from ..tensors.part import Part

# fp32 counts whole numbers up to here.
_FP32_COUNTS_TO = 1 << 24


def count_as_torch(step: int) -> torch.Tensor:
    """A step count as ``torch.optim`` keeps it: 0-d, in fp32, which would round a larger count than it can hold."""
    return torch.tensor(step, dtype=torch.float32 if step <= _FP32_COUNTS_TO else torch.float64)


@dataclass
class ParamState:
    """Step count, carried scalars, and tensors with the param's full shape (or parts of such).

    Attributes:
        step: updates so far.
        carried: scalars that the rule hands on from step to step.
        tensors: by name of the state, and "master" where the param is of low precision.
    """

    step: int = 0
    carried: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def to_torch(self, counts_steps: bool) -> dict[str, Any]:
        """In the form of ``torch.optim``'s state dicts."""
        counters: dict[str, Any] = {}
        if counts_steps:
            counters["step"] = count_as_torch(self.step)
        carried = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.carried.items()}
        return {**counters, **carried, **self.tensors}

    def copy(self) -> "ParamState":
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return ParamState(self.step, dict(self.carried), tensors)

    @staticmethod
    def from_torch(
        state: Mapping[str, Any], rule: Rule, group: Mapping[str, Any], param: torch.Tensor, name: str
    ) -> "ParamState":
        """Reads what :meth:`to_torch` or a torch class wrote for ``param``.

        Raises:
            StateError: it is not a state that ``rule`` keeps for this param.
        """
        # SGD writes None for a momentum that has not begun.
        tensors = {key: value for key, value in state.items() if value is not None}
        counters = ("step",) if rule.counts_steps else ()
        lacking = [key for key in (*counters, *rule.carried) if key not in tensors]
        # Where no step is counted, having a state means having taken a step.
        step = int(tensors.pop("step", 1 if tensors else 0))
        carried = {key: float(tensors.pop(key)) for key in rule.carried if key in tensors}
        _check_names(tensors, step, rule, group, name)
        if tensors and lacking:
            raise StateError(
                f"the state of {name} lacks {lacking}: the update would be that of a first step, so nothing was "
                "loaded. A format that keeps the count elsewhere must be converted: give each param's state its 'step'."
            )
        for key, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape != param.shape:
                found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise StateError(
                    f"{key} of {name} has shape {found}, the param {tuple(param.shape)}: this is the state of another "
                    "model, and nothing was loaded. Load the state dict that was saved with this one."
                )
        return ParamState(step, carried, tensors)


def _check_names(tensors: Mapping[str, Any], step: int, rule: Rule, group: Mapping[str, Any], name: str) -> None:
    needed = rule.variant(group).states
    # An average of the weights that was not kept so far begins with the weights.
    missing = [state for state in needed if state not in tensors and state != EMA] if step else []
    unknown = [state for state in tensors if state not in (*needed, "master")]
    if missing or unknown:
        likely = "It is probably the state of another optimizer, or of other flags (amsgrad, momentum, centered)."
        if not missing and unknown == [EMA]:
            likely = "It holds an average of the weights: construct the optimizer with ema=, or take 'ema' out of it."
        raise StateError(
            f"the state of {name} does not fit {rule.name}, which needs {list(needed)}: missing {missing}, not known "
            f"{unknown}. Training would go on from other moments than were saved, so nothing was loaded. {likely}"
        )


def check_part(part: Part, start: int, numel: int, what: str) -> None:
    """Raises StateError unless the part holds elements ``[start, start + numel)``."""
    end = part.start + part.local.numel()
    if numel and not (part.start <= start and start + numel <= end):
        raise StateError(
            f"{what}: this rank needs elements [{start}:{start + numel}], the part holds [{part.start}:{end}]. Call "
            "consolidate_state_dict() on the optimizer that it comes from, and load the consolidated dict."
        )
