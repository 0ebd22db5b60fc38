"""A GradScaler with DeepSpeed's hysteresis, lowest scale and fixed scale, which torch's lacks."""

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ShardoptError


@dataclass(frozen=True)
class LossScale:
    """The rule of a loss scale.

    Attributes:
        initial: the first scale; ``fixed`` keeps it.
        window: steps without overflow, after the first one, until the scale is doubled.
        hysteresis: overflows until the scale is halved; earlier overflows only skip their step.
        refills: True if every step without overflow restores the hysteresis; False: only a doubling does.
        floor: the lowest scale, at which an overflow is an error.
    """

    initial: float = 2.0**16
    fixed: bool = False
    window: int = 1000
    hysteresis: int = 2
    refills: bool = False
    floor: float = 1.0

    def __post_init__(self) -> None:
        if not self.initial > 0 or not self.floor > 0 or self.window < 1 or self.hysteresis < 1:
            raise ValueError(f"a loss scale is above 0, its window and hysteresis at least 1, found {self}.")


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` (unfused and fused protocol) whose ``update()`` follows a :class:`LossScale`."""

    def __init__(self, scale: LossScale, device: str, enabled: bool = True):
        super().__init__(device, init_scale=scale.initial, enabled=enabled)
        self._rule = scale
        self._patience = scale.hysteresis
        self._stable = -1  # steps since the last overflow; -1 as if one had just happened

    def __repr__(self) -> str:
        return f"LossScaler(scale={self.get_scale():g}, {self._rule})" if self.is_enabled() else "LossScaler(disabled)"

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale as torch's scaler does, by this rule.

        Raises:
            ShardoptError: the gradients overflowed at the lowest scale. The step was skipped.
        """
        if not self.is_enabled() or new_scale is not None:
            super().update(new_scale)
            return
        overflow = any(
            bool(found)
            for states in self._per_optimizer_states.values()
            for found in states["found_inf_per_device"].values()
        )
        super().update(self._after(overflow))

    def _after(self, overflow: bool) -> float:
        rule, scale = self._rule, self.get_scale()
        if rule.fixed:
            return scale
        if overflow:
            self._stable = -1
            if self._patience > 1:
                self._patience -= 1
                return scale
            if scale <= rule.floor:
                raise ShardoptError(
                    "look for the loss that grows, train in bf16, or lower min_loss_scale: the gradients overflow at "
                    f"the lowest loss scale, {scale}, so every step would be skipped."
                )
            return max(scale / 2, rule.floor)
        self._stable += 1
        if rule.refills:
            self._patience = rule.hysteresis
        if self._stable > 0 and self._stable % rule.window == 0:
            self._patience = rule.hysteresis
            return scale * 2
        return scale

    def state_dict(self) -> dict[str, Any]:
        own = {"hysteresis_left": self._patience, "stable_steps": self._stable} if self.is_enabled() else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._patience = state_dict.get("hysteresis_left", self._rule.hysteresis)
            self._stable = state_dict.get("stable_steps", -1)
