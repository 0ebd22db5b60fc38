"""What is known of one bound param, and how params are listed before that."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import BindingError
from ..tensors.gradient_slice import GradientSlice
from .hyperparameters import Group as Group
from .param_state import ParamState
from .shard import Shard

Candidate = tuple[str, torch.nn.Parameter, Group]  # name for messages, param, its group


@dataclass(eq=False)
class ParamRecord:
    """What is known of one bound param. Kept in a table: nothing is hung on the user's tensor."""

    param: torch.nn.Parameter
    name: str
    shard: Shard
    index: int  # in the shard's bucket
    version: int | None  # of the param's data at the end of the last step; None: its master was loaded since
    step: int = 0  # updates so far; an int: a float counter stops counting (bf16 at 256, fp32 at 2**24)
    carried: dict[str, float] = field(default_factory=dict)
    has_state: bool = False
    gradient_slice: GradientSlice | None = None  # of its reduced gradient, where the module was handed over
    begins_average: bool = False  # with the weights as its next step finds them
    initial: Mapping[str, float] = field(default_factory=dict)  # what states hold before the first step, if it has any

    def take_counters(self, state: ParamState) -> None:
        self.step, self.carried, self.has_state = state.step, dict(state.carried), True

    def forget(self) -> None:
        """Back to before the param's first step; its states are zeroed with its shard's, and begun by the caller."""
        self.step, self.carried, self.has_state = 0, {}, bool(self.initial)
        self.begins_average = False
        self.shard.awaiting.pop(self.index, None)

    def check(self) -> None:
        """Raises BindingError if the param is not where it was put."""
        if not self.shard.bucket.holds(self.index):
            param, bucket = self.param, self.shard.bucket
            raise BindingError(
                f"{self.name} was moved, recast or given other storage after the first step (now "
                f"{_describe(param)}, bound on {bucket.device} as {bucket.dtype}): an update would go to memory that "
                "the model no longer reads. Move and cast the model before the first step; to do it later keep "
                "optimizer.state_dict() (consolidated, at several ranks), call close(), and construct it anew."
            )


def named_params(groups: Sequence[Group]) -> Iterator[Candidate]:
    """Every param with a name for messages and its group, in the order of the groups."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            where = f"param {index} of group {number} (shape {tuple(param.shape)})"
            yield (f"{where} {names[index]!r}" if names else where), param, group


def without_process_group(group: Group) -> Group:
    """What of a group can be saved: its process group is this run's."""
    return {key: value for key, value in group.items() if key != "process_group"}


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
