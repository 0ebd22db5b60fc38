"""The state of one param outside of its shard, as ``state_dict()`` shows it and ``load_state_dict()`` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError
from ..rules.rule import EMA
from ..rules.state_names import STATE_NAMES

if TYPE_CHECKING:
    from ..rules import Rule
    from ..rules.rule import Shape

# The largest whole number up to which fp32 can count.
_FP32_COUNTS_TO = 1 << 24


def count_as_torch(step: int) -> torch.Tensor:
    """Returns a step count as ``torch.optim`` has it: 0-d fp32, or fp64 for a count that fp32 would round."""
    return torch.tensor(step, dtype=count_dtype(step))


def count_dtype(step: int) -> torch.dtype:
    """Returns the dtype in which a step count is shown."""
    return torch.float32 if step <= _FP32_COUNTS_TO else torch.float64


@dataclass
class ParamState:
    """A step count, carried scalars, and tensors with the param's full shape (or parts of them).

    Attributes:
        step: updates so far.
        carried: scalars that the rule passes from step to step.
        tensors: by name of the state; "master" for the master weights of a low-precision param.
        margins: by name, states with a value for each row or column of the param.
        notes: the script's own entries, by keys that no rule keeps.
        same: names of what was read as the very tensor that the param's record shows.
    """

    step: int = 0
    carried: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    margins: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    same: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        """True if there are notes alone, and nothing that a rule keeps."""
        return bool(self.notes) and not (self.step or self.carried or self.tensors or self.margins)

    def to_torch(self, counts_steps: bool) -> dict[str, Any]:
        """Returns the state in the form of ``torch.optim``'s state dicts."""
        counters: dict[str, Any] = {}
        if counts_steps:
            counters["step"] = count_as_torch(self.step)
        carried = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.carried.items()}
        return {**counters, **carried, **self.margins, **self.tensors}

    def copy(self) -> ParamState:
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        margins = {name: tensor.detach().clone() for name, tensor in self.margins.items()}
        return ParamState(self.step, dict(self.carried), tensors, margins)

    @staticmethod
    def from_torch(
        state: Mapping[str, Any],
        rule: Rule,
        group: Mapping[str, Any],
        param: torch.Tensor,
        name: str,
        whole: Shape | None = None,
    ) -> ParamState:
        """Reads what :meth:`to_torch` or a torch class wrote for ``param``.

        Args:
            whole: the shape of the DTensor of which ``param`` is a slice; None: ``param`` is whole.

        Raises:
            StateError: ``rule`` keeps no such state for this param.
        """
        rule = rule.of(group)
        # torch.optim.SGD writes None for a momentum before its first step.
        notes = {key: value for key, value in state.items() if is_note(key, rule)}
        tensors = {key: value for key, value in state.items() if value is not None and key not in notes}
        counters = ("step",) if rule.counts_steps else ()
        lacking = [key for key in (*counters, *rule.carried) if key not in tensors]
        # A rule that counts no steps has tensors only after a step.
        step = int(tensors.pop("step", 1 if tensors else 0))
        carried = {key: float(tensors.pop(key)) for key in rule.carried if key in tensors}
        whole = param.shape if whole is None else whole
        margins = rule.variant(group, whole).margins
        _check_names(tensors, step, rule, group, whole, name)
        if tensors and lacking:
            raise StateError(
                f"give each param's state its 'step': the state of {name} lacks {lacking}, the update would be that of "
                "a first step, and nothing was loaded. Convert a format that keeps the count elsewhere."
            )
        for key, tensor in tensors.items():
            is_margin = key in margins
            shape = rule.state_shape(key, whole) if is_margin else tuple(param.shape)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
                found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                of_param = f"{tuple(whole)}, which needs {shape}" if is_margin else f"{shape}"
                raise StateError(
                    f"load the state dict that was saved with this model: {key} of {name} has shape {found}, the param "
                    f"{of_param}. This is the state of another model, and nothing was loaded."
                )
        of_margins = {key: tensors.pop(key) for key in margins if key in tensors}
        return ParamState(step, carried, tensors, of_margins, notes)


def is_note(key: Any, rule: Rule) -> bool:
    """True if a key of a state is a script's own: no rule that is shipped keeps it, nor this one."""
    return key not in STATE_NAMES and key not in rule.states and key not in rule.margins and key not in rule.carried


def _check_names(
    tensors: Mapping[str, Any], step: int, rule: Rule, group: Mapping[str, Any], shape: Shape, name: str
) -> None:
    variant = rule.variant(group, shape)
    needed = (*variant.margins, *variant.states)
    # A state without an average of the weights is accepted: the average begins with the weights.
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
