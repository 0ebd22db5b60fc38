"""The slow, plain optimizer that kernels and optimizers are compared with: a rule's source run by NumPy."""

import functools
from collections.abc import Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch

from shardopt.rules import words
from shardopt.rules.rule import Rule, Variant

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Oracle:
    """Applies a rule to arrays, in float64 or, operation by operation as the kernels do, in float32.

    ``params`` and ``states`` may be read and overwritten between steps; ``group`` is a param group, whose values may
    change from step to step.
    """

    def __init__(self, rule: Rule, group: dict[str, Any], params: Sequence[Any], dtype: type = np.float64) -> None:
        self.rule, self.group, self.dtype = rule, group, dtype
        self.params: list[Array] = [np.array(param, dtype) for param in params]
        self.states: list[dict[str, Array]] = [
            {name: np.zeros_like(param) for name in self.variant.states} for param in self.params
        ]
        self.steps = [0 for _ in params]
        self.carried: list[dict[str, float]] = [{} for _ in params]

    @property
    def plain_group(self) -> dict[str, Any]:
        return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in self.group.items()}

    @property
    def variant(self) -> Variant:
        return self.rule.variant(self.plain_group)

    def step(self, grads: Sequence[Any]) -> None:
        """One step; a param whose gradient is None is left alone, step count included."""
        for index, grad in enumerate(grads):
            if grad is not None:
                self.steps[index] += 1
                self.update(index, np.array(grad, self.dtype))

    def update(self, index: int, grad: Array) -> None:
        variant, state = self.variant, self.states[index]
        values, self.carried[index] = self.rule.evaluate(
            variant, self.plain_group, self.steps[index], self.carried[index], grad.shape
        )
        names: dict[str, Any] = {word: getattr(words, word) for word in (*words.WORDS, *words.REDUCTIONS)}
        names |= {"param": self.params[index], "grad": grad}
        names |= {f"state_{name}": state[name] for name in variant.states}
        names |= {f"s_{name}": self.dtype(value) for name, value in zip(variant.scalars, values, strict=True)}
        with np.errstate(all="ignore"):
            exec(_code(variant.source), names)
        self.params[index] = np.asarray(names["param"])
        for name in variant.states:
            state[name] = np.asarray(names[f"state_{name}"])


@functools.cache
def _code(source: str) -> CodeType:
    return compile(source, "<rule>", "exec")
