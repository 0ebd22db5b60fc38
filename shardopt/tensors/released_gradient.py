"""``param.grad`` after its gradient was used and released: a tensor that cannot be mistaken for a gradient."""

from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from ..errors import ShardoptError, StateError
from .part import Part

aten = torch.ops.aten


def second_backward() -> ShardoptError:
    """Returns the error for a second backward before ``step()``."""
    return ShardoptError(
        "run all backwards of a step but the last under no_sync(), or sum several losses into one, and call step() "
        "after the last: a second backward began before step(), and the first one's gradients were used for an "
        "update (release_gradients=True) and are gone. If the first was of another module's loss, which runs through "
        "this module, freeze this module's params meanwhile (requires_grad_(False)): they were updated."
    )


class ReleasedGradient(Part):
    """``param.grad`` between a backward and its step, where the mean gradient was used and is gone.

    ``zero_()`` changes nothing. Every other function is refused: it would silently read a zero.
    """

    whose: str

    @staticmethod
    def __new__(cls, whose: str, like: torch.Tensor) -> Self:
        gradient = cls._wrapper(like, like.dtype, like.device)
        gradient.start, gradient.whose = 0, whose
        return gradient

    @property
    def local(self) -> torch.Tensor:
        raise self._gone("it was read")

    def full_tensor(self) -> torch.Tensor:
        raise self._gone("full_tensor() was called on it")

    def _gone(self, what: str) -> StateError:
        return StateError(
            "construct the optimizer without release_gradients to scale, log or clip gradients (max_grad_norm beside "
            f"clip_by='previous' clips by the norm of the step before): the gradient of {self.whose} was used for the "
            f"update and released while backward ran (release_gradients=True), and {what}. After step(), "
            "optimizer.grad_norm is the norm of all gradients. If a GradScaler scaled the loss, the update was wrong: "
            "load a checkpoint."
        )

    def _refused(self, call: str) -> StateError:
        return self._gone(f"{call} was called on it")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return ReleasedGradient(self.whose, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._gone("it was to be saved")

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        gradients = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, cls)]
        if function is aten.detach.default:
            return cls(gradients[0].whose, gradients[0])
        if function is aten.zero_.default:
            return gradients[0]
        if function is aten._foreach_zero_.default:
            for each in arguments[0]:
                each.zero_()
            return None
        if function is aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
            raise second_backward()
        raise gradients[0]._gone(f"{function} was called on it")
